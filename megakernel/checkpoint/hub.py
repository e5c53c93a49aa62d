"""Models of the Hugging Face hub: fetching one for `import`, and publishing an export."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from data_pipeline.tokenizers import unreachable
from megakernel.config import RunFailed, UserError
from megakernel.config.errors import first_line

PREFIX = "hf:"

_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+", re.ASCII)

_READ = (
    # Not consolidated.safetensors, the same weights under other names, nor adapters.
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jin*"),
)
"""Files that `import` reads, all in the repository's first folder; no code among them."""


def files_to_fetch(files: Iterable[str], name: str) -> list[str]:
    """Those of a repository's files that `import` reads. UserError if there is no model in safetensors among them."""
    files = sorted(files)
    wanted = [file for file in files if "/" not in file and any(fnmatch(file, pattern) for pattern in _READ)]
    if "config.json" not in wanted:
        raise UserError(f"{name} holds no config.json, so it is no model of transformers; name another one")
    if not any(file.endswith(".safetensors") for file in wanted):
        others = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors"))]
        has = f"only {', '.join(others[:3])}" if others else "no weights"
        raise UserError(
            f"{name} has {has}, and import reads model*.safetensors; save it with save_pretrained of transformers, "
            "and give that folder"
        )
    return wanted


def local_folder(text: str) -> Path:
    """The folder of a checkpoint: a path, or for hf:NAME[@REVISION] the hub's cache, into which it is fetched.

    Raises UserError for a wrong name, no such model, one that needs a login, and without a network if the cache does
    not hold it.
    """
    if not text.startswith(PREFIX):
        return Path(text)
    name, at, revision = text.removeprefix(PREFIX).partition("@")
    if not _NAME.fullmatch(name) or (at and not revision):
        raise UserError(f"{text} is no model of the hub; write hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
    from huggingface_hub import HfApi, snapshot_download

    version = revision or None
    if (reason := unreachable(name, "model")) is not None:
        try:
            return Path(
                snapshot_download(name, revision=version, allow_patterns=[*_READ], local_files_only=True)
            )
        except Exception:  # not cached, or not all of it
            command = f"hf download {name} --local-dir models/{name.rpartition('/')[2]}"
            raise UserError(
                f"{text} cannot be fetched ({reason}); run `{command}` where huggingface.co can be reached, and give "
                "that folder"
            ) from None
    try:
        wanted = files_to_fetch(HfApi().list_repo_files(name, revision=version), text)
        return Path(snapshot_download(name, revision=version, allow_patterns=wanted))
    except UserError:
        raise
    except Exception as error:
        raise UserError(_refusal(text, error)) from None


def _refusal(text: str, error: Exception) -> str:
    """Why the hub gave nothing, with the remedy."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{text} is gated; accept its terms on huggingface.co, and run `hf auth login` or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{text} does not exist, or is private; correct the name, or run `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{text} has no such revision; name a branch, a tag or a commit"
    return f"{text} cannot be fetched ({first_line(error)}); try again: what was fetched is kept"


@dataclass(frozen=True)
class Push:
    """Where an export is published."""

    repo: str
    is_public: bool

    @classmethod
    def checked(cls, repo: str, is_public: bool) -> "Push":
        """UserError, before anything is exported, for a wrong name, no token, and a hub that does not accept it."""
        if not _NAME.fullmatch(repo):
            raise UserError(f"--push {repo} is no name of a model; write OWNER/NAME")
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HfHubHTTPError

        if get_token() is None:
            raise UserError(
                f"--push {repo} needs a token that may write; run `hf auth login`, or set HF_TOKEN to one of "
                "huggingface.co/settings/tokens"
            )
        try:
            HfApi().whoami()
        except HfHubHTTPError as error:
            raise UserError(
                f"--push {repo}: the hub refuses the token ({first_line(error)}); log in again"
            ) from None
        except (
            Exception
        ) as error:  # offline mode, DNS, proxies and certificates: exceptions of several libraries
            raise UserError(
                f"--push {repo} cannot reach huggingface.co ({first_line(error)}); export without it, and run "
                f"`hf upload {repo} DIR` where it can be reached"
            ) from None
        return cls(repo, is_public)

    def upload(self, folder: Path) -> str:
        """Create the repository if there is none, and upload a folder; returns its address.

        A new one is private unless `is_public`; an old one stays as it is. Raises RunFailed: the export is complete.
        """
        from huggingface_hub import HfApi

        try:
            api = HfApi()
            url = api.create_repo(self.repo, private=not self.is_public, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Export of Megakernel")
        except Exception as error:
            raise RunFailed(
                f"{folder} is complete, but --push {self.repo} failed ({first_line(error)}); run "
                f"`hf upload {self.repo} {folder}`"
            ) from None
        return str(url)
