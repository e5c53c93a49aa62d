"""Models of the hub: names, files, and what is said without a network, a token or a model."""

import pytest

from data_pipeline.tokenizers import BPE_EOD, byte_level
from launch.cli import main
from launch.exit_status import ExitStatus
from megakernel.checkpoint.hub import Push, files_to_fetch, local_folder
from megakernel.config import RunFailed, UserError, load
from tests.e2e.test_use_a_folder import save_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home of the hub's library, without a network and without a login."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    return tmp_path


@pytest.fixture
def cached(home):
    """A model that the cache holds, as the hub's library keeps it."""
    repo = home / "hub" / "models--me--tiny"
    folder = save_llama(repo / "snapshots" / COMMIT, 257, byte_level(256, BPE_EOD), 256)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    return folder


def refused(capsys, *words):
    assert main([*map(str, words)]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("megakernel: error: ")


def test_what_import_reads_is_fetched_and_nothing_else():
    files = [
        *(
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
        ),
        *(
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ),
        *("vocab.json", "merges.txt", "special_tokens_map.json", "chat_template.jinja"),
    ]
    others = [
        *("README.md", ".gitattributes", "modeling_x.py", "pytorch_model.bin", "consolidated.safetensors"),
        *("original/consolidated.00.pth", "onnx/config.json", "adapter_model.safetensors", "tf_model.h5"),
    ]
    assert files_to_fetch([*others, *files], "hf:x") == sorted(files)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["model.safetensors"], "holds no config.json"),
        (["config.json"], "has no weights, and import reads model*.safetensors"),
        (["config.json", "pytorch_model.bin"], "has only pytorch_model.bin, and import reads"),
        (["config.json", "adapter_model.safetensors"], "has only adapter_model.safetensors"),
    ],
)
def test_a_repository_without_a_model_is_refused(files, message):
    with pytest.raises(UserError) as caught:
        files_to_fetch(files, "hf:me/x")
    assert message in str(caught.value)


def test_a_path_is_a_folder_whatever_its_name(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:a b", "hf:me/x@", "hf:../x/.."])
def test_a_wrong_name_is_refused(name, capsys):
    assert refused(capsys, "import", name).startswith(f"{name} is no model of the hub; write hf:OWNER/NAME")


def test_without_a_network_the_command_for_a_machine_with_one_is_given(capsys):
    line = refused(capsys, "import", "hf:me/big")
    assert line.startswith("hf:me/big cannot be fetched (")
    assert "run `hf download me/big --local-dir models/big` where huggingface.co can be reached" in line


def test_without_a_network_what_the_cache_holds_is_imported(cached, tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(
        "extends: tiny.yaml\nrun: {name: x}\ndata: {train: data/x}\n"
        "training: {steps: 1, seq_len: 64, global_batch_size: 1}\n"
    )
    assert main(["import", "hf:me/tiny", "--to", str(tmp_path / "tiny.yaml")]) == ExitStatus.DONE
    assert "hf:me/tiny: llama, " in capsys.readouterr().out
    config = load(tmp_path / "base.yaml")
    assert config.init.source == cached
    assert config.model.vocab_size == 257


def test_a_revision_that_the_cache_does_not_hold_is_another_model(cached, capsys):
    assert local_folder("hf:me/tiny") == cached
    assert local_folder(f"hf:me/tiny@{COMMIT}") == cached
    assert "hf:me/tiny@v2 cannot be fetched" in refused(capsys, "import", "hf:me/tiny@v2")


PUSH = ("export", "runs/none", "--to", "models/none", "--push", "me/mine")


def test_a_push_without_a_token_is_refused_before_anything_is_exported(capsys):
    line = refused(capsys, *PUSH)
    assert line.startswith(
        "--push me/mine needs a token that may write; run `hf auth login`, or set HF_TOKEN"
    )


def test_a_push_without_a_network_is_refused_before_anything_is_exported(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    line = refused(capsys, *PUSH)
    assert line.startswith("--push me/mine cannot reach huggingface.co (")
    assert line.endswith("export without it, and run `hf upload me/mine DIR` where it can be reached")


def test_an_upload_that_fails_leaves_the_folder_and_names_the_command(tmp_path):
    with pytest.raises(RunFailed) as caught:
        Push("me/mine", is_public=False).upload(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} is complete, but --push me/mine failed (")
    assert str(caught.value).endswith(f"run `hf upload me/mine {tmp_path}`")


@pytest.mark.parametrize("repo", ["a/b/c", "", "me/", "me mine"])
def test_a_push_to_no_name_is_refused(repo):
    with pytest.raises(UserError, match=r"is no name of a model; write OWNER/NAME"):
        Push.checked(repo, is_public=False)


def test_publicity_without_a_push_is_refused(capsys):
    assert refused(capsys, *PUSH[:-2], "--public") == "--public has no effect alone; add --push OWNER/NAME"
