"""A run as a model of lm-evaluation-harness: scores, continuations, limits, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_pipeline.tokenizers import ByteTokenizer
from megakernel.config import UserError
from megakernel.evaluation.harness import HarnessOptions, HarnessResult, HarnessTask, _scores
from megakernel.evaluation.harness_model import ScoringModel
from megakernel.evaluation.records import record
from megakernel.evaluation.run import parse
from megakernel.evaluation.subject import LoadedRun
from megakernel.generation import Sampling
from tests.serving import RandomModel
from tests.unit.config import trees
from tests.unit.generation.small_models import FLURKA, build

SEQ_LEN = 64


def subject(add_bos=False, **parts):
    """A loaded random model of bytes."""
    tokenizer = ByteTokenizer()
    model = build(vocab_size=tokenizer.vocab_size, **{"attention": FLURKA, **parts})
    config = trees.config(model=parts, training={"seq_len": SEQ_LEN, "micro_batch_size": 2})
    config = config.model_copy(update={"model": model.settings.model})
    opened = RandomModel(Path("none"), None, config, tokenizer, model)
    fields = {name: getattr(opened, name) for name in ("folder", "run", "config", "tokenizer")}
    return LoadedRun(**fields, corpora=None, model=model, device=torch.device("cpu"))


def scoring(source, continued=None):
    passes = []
    return ScoringModel(source, lambda *step: passes.append(step), continued), passes


def requests(*arguments):
    return [SimpleNamespace(args=one) for one in arguments]


@torch.no_grad()
def reference(source, ids, scored):
    """Log-probability of the last ids given all before them, and whether they are the most likely ones."""
    tokens = torch.tensor([ids[:-1]])
    logits = source.model.logits(source.model.hidden(tokens, torch.arange(len(ids) - 1)[None]))[0]
    logs = logits.double().log_softmax(-1)[-scored:]
    labels = torch.tensor(ids[-scored:])
    greedy = bool((logits[-scored:, :257].argmax(-1) == labels).all())
    return float(logs.gather(1, labels[:, None]).sum()), greedy


# 1e-4 relative: float32 sums of up to a hundred log-probabilities, in batches of other sizes.
def close(value):
    return pytest.approx(value, rel=1e-4, abs=1e-4)


PAIRS = [
    ("import", " os"),
    ("a" * 100, "bc"),
    ("def f(x):\n    return", " x + 1"),
    ("é", "à" * 20),
    ("x ", "y"),
]


def test_continuations_have_the_models_log_probabilities_in_batches_of_any_lengths():
    source = subject()
    model, passes = scoring(source)
    found = model.loglikelihood(requests(*PAIRS))
    for (context, continuation), (value, greedy) in zip(PAIRS, found, strict=True):
        # The harness moves a space at the end of a context to its continuation.
        whole = list((context + continuation).encode())
        expected = reference(source, whole, len(whole) - len(context.rstrip().encode()))
        assert (value, greedy) == (close(expected[0]), expected[1])
    assert passes[-1] == (len(PAIRS), len(PAIRS))
    assert len(passes) < len(PAIRS), "several texts share a forward pass"
    assert (model.requests, model.shortened) == (len(PAIRS), 0)


@torch.no_grad()
def test_the_most_likely_continuation_is_greedy_and_another_is_not():
    source = subject()
    model, _ = scoring(source)
    ids = list(b"import ")
    prompt = list(ids)
    for _ in range(3):
        hidden = source.model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None])
        ids.append(int(source.model.logits(hidden)[0, -1, :257].argmax()))
    likely = ids[len(prompt) :]
    other = [*likely[:2], (likely[2] + 1) % 256]
    found = model._loglikelihood_tokens([(("", ""), prompt, likely), (("", ""), prompt, other)])
    assert [greedy for _, greedy in found] == [True, False]


def test_whole_texts_of_any_length_are_scored_in_one_piece():
    source = subject()
    model, _ = scoring(source)
    text = "import numpy as np\n" * 20
    assert len(text) > 4 * SEQ_LEN
    (found,) = model.loglikelihood_rolling(requests((text,)))
    # The end of a document comes first, and a document begins after it: position 0 again.
    ids = [256, *text.encode()]
    tokens, positions = torch.tensor([ids[:-1]]), torch.tensor([[0, *range(len(ids) - 2)]])
    with torch.no_grad():
        logs = source.model.logits(source.model.hidden(tokens, positions))[0].double().log_softmax(-1)
    assert found == close(float(logs.gather(1, torch.tensor(ids[1:])[:, None]).sum()))
    assert model.shortened == 0


def test_texts_beyond_learned_positions_lose_their_beginning_and_are_counted():
    source = subject(position="learned", max_positions=SEQ_LEN)
    model, _ = scoring(source)
    context, continuation = "z" * 20 + "a" * (SEQ_LEN - 1), "bc"
    found = model.loglikelihood(requests((context, continuation), ("a", "b")))
    ids = list((context + continuation).encode())[-SEQ_LEN - 1 :]
    assert found[0][0] == close(reference(source, ids, 2)[0])
    assert (model.requests, model.shortened) == (2, 1)


def test_whole_texts_beyond_learned_positions_are_scored_in_windows():
    source = subject(position="learned", max_positions=SEQ_LEN)
    model, _ = scoring(source)
    text = "import numpy as np\n" * 10
    (found,) = model.loglikelihood_rolling(requests((text,)))
    ids = list(text.encode())
    pieces = [[256, *ids[:SEQ_LEN]]]
    pieces += [ids[first - 1 : first + SEQ_LEN] for first in range(SEQ_LEN, len(ids) - SEQ_LEN, SEQ_LEN)]
    rest = len(ids) % SEQ_LEN
    whole = 0.0
    for number, piece in enumerate(pieces):
        tokens = torch.tensor([piece[:-1]])
        positions = torch.arange(len(piece) - 1)[None]
        if number == 0:
            positions = torch.tensor([[0, *range(len(piece) - 2)]])
        with torch.no_grad():
            logs = source.model.logits(source.model.hidden(tokens, positions))[0].double().log_softmax(-1)
        whole += float(logs.gather(1, torch.tensor(piece[1:])[:, None]).sum())
    # The harness gives the last window as many earlier tokens as fit.
    last = ids[-SEQ_LEN - 1 :]
    assert found == close(whole + reference(source, last, rest)[0])
    assert model.shortened == 0


def test_texts_are_continued_with_the_options_of_the_task():
    source = subject()
    seen = []

    def continued(opened, model, prompts, *, max_new_tokens, stop, sampling):
        Sampling(**sampling)
        seen.append((list(prompts), max_new_tokens, tuple(stop), dict(sampling)))
        yield from reversed([(index, f"answer {index}") for index in range(len(prompts))])

    model, passes = scoring(source, continued)
    first = {"until": ["\n"], "max_gen_toks": 7, "do_sample": False}
    drawn = {"until": "x", "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    found = model.generate_until(requests(("a", first), ("b", drawn), ("c", first)))
    assert found == ["answer 0", "answer 0", "answer 1"]
    assert seen == [
        ([[97], [99]], 7, ("\n",), {"temperature": 0.0}),
        ([[98]], 256, ("x",), {"temperature": 0.5, "top_p": 0.9}),
    ]
    assert passes == [(1, 3), (2, 3), (3, 3)]


def test_an_option_of_generation_that_is_not_there_is_refused():
    model, _ = scoring(subject(), lambda *args, **options: iter(()))
    with pytest.raises(UserError, match=r"generation_kwargs \{'num_beams': 4\} are not supported"):
        model.generate_until(requests(("a", {"until": [], "num_beams": 4})))


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        (["lm_eval"], {}, "--task lm_eval names no task of the harness; write --task lm_eval:hellaswag"),
        (["lm_eval:fewshot=2"], {}, "names no task of the harness"),
        (["lm_eval:piqa,fewshots=2"], {}, "has no option fewshots; choose fewshot"),
        (["lm_eval:piqa,fewshot"], {}, "'fewshot' is not key=value"),
        (["lm_eval:piqa,fewshot=-1"], {}, "fewshot=-1 is too few; give 0 or more"),
        (["lm_eval:piqa,samples=0"], {}, "samples=0 is too few; give 1 or more"),
        (["lm_eval:piqa"], {"seq_len": 64}, "--seq-len 64 applies only to lm; leave it out"),
        (
            ["lm"],
            {"include_path": Path("tasks")},
            "--include-path tasks applies only to lm_eval; leave it out",
        ),
        (["lmeval:piqa"], {}, "is not a task; choose lm_eval"),
    ],
)
def test_a_wrong_task_is_refused(specs, options, message):
    with pytest.raises(UserError) as caught:
        parse(specs, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["masked_lm", "encoder_decoder"])
def test_a_model_that_does_not_continue_text_is_refused_with_a_remedy(kind):
    model = SimpleNamespace(is_causal=False, kind=kind)
    run = SimpleNamespace(config=SimpleNamespace(model=model), folder="runs/x")
    task = HarnessTask("lm_eval:arc_easy", "arc_easy", HarnessOptions(), None, None)
    message = f"model.kind={kind} of runs/x does not continue text; give a run of a causal_lm"
    with pytest.raises(UserError, match=message):
        task.check(run)


def test_the_number_of_documents_is_the_tasks_own_or_the_default_of_all():
    tasks = parse(["lm_eval:piqa", "lm_eval:arc_easy,samples=3,fewshot=5"], samples=8)
    assert [(task.name, task.options.samples, task.options.fewshot) for task in tasks] == [
        ("piqa", 8, None),
        ("arc_easy", 3, 5),
    ]


FOUND = {
    "sums": {"alias": "sums", "acc,none": 0.5, "acc_stderr,none": 0.25, "sample_len": 4},
    "written": {"exact_match,strict-match": 1, "exact_match_stderr,strict-match": "N/A"},
}
"""Results as the harness has them."""


def result(found, shortened=0):
    return HarnessResult(
        task="lm_eval:both",
        run="runs/x",
        step=7,
        version="0.4.13",
        documents={"sums": 4, "written": 1000},
        fewshot={"sums": 0, "written": 5},
        scores=tuple(_scores(found)),
        requests=3000,
        shortened=shortened,
    )


def test_scores_are_recorded_with_their_tasks_metrics_and_filters(tmp_path):
    file = record(tmp_path, 7, "lm_eval:both", result(FOUND))
    recorded = json.loads(file.read_text())
    assert file.name == "lm_eval-both.json"
    assert recorded["scalars"] == {"sums/acc": 0.5, "written/exact_match-strict-match": 1.0}
    assert recorded["scores"][0] == {
        "task": "sums",
        "metric": "acc",
        "filter": "none",
        "value": 0.5,
        "standard_error": 0.25,
    }
    table = file.with_suffix(".md").read_text()
    assert "| sums | acc | 0.5000 | 0.2500 | 4 | 0 |" in table
    assert "| written | exact_match strict-match | 1.0000 |  | 1,000 | 5 |" in table


def test_metrics_of_one_task_have_their_own_names():
    assert result({"sums": FOUND["sums"]}).scalars() == {"acc": 0.5}


def test_the_table_says_how_many_texts_were_cut():
    assert result(FOUND).table().below == ()
    assert result(FOUND, shortened=1200).table().below == (
        "1,200 of 3,000 texts lost their beginning to learned positions",
    )
