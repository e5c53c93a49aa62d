"""Beam search: what it finds, and that texts in a batch do not depend on each other."""

from itertools import product

import pytest
import torch

from megakernel.config import Model
from megakernel.config.decoding import Beams
from megakernel.generation.translation import Translation, _Search, translate
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import OneProcess

VOCAB, EOD, MOST = 6, 5, 4
SOURCES = [[1, 2, 3, EOD], [4, 4, EOD], [0, 1, 2, 3, 4, 1, EOD], [2, EOD]]
STACKS = {
    "softmax": ("softmax", "softmax", "softmax"),
    "FLuRKA": (
        {"preset": "flurka_performer", "compression": {"rank": 4}},
        {"preset": "flurka", "compression": {"block_size": 2, "rank": 1}},
        "linear",
    ),
    "kernels": ("performer", "linear", "performer"),
}


def build(stack, vocab_size=VOCAB):
    encoder, decoder, cross = STACKS[stack]
    model = Model.model_validate(
        {
            "kind": "encoder_decoder",
            "encoder": {"num_layers": 1, "attention": encoder, "cross_attention": cross},
            **{"num_layers": 2, "hidden_size": 32, "num_heads": 2, "attention": decoder, "init_std": 0.3},
            **({"max_positions": 16} if stack == "FLuRKA" else {}),
        }
    )
    return LanguageModel(ModelSettings(model, vocab_size, OneProcess(), isolate_documents=False)).eval()


@torch.no_grad()
def log_probability(model, source, text):
    """Of a text and its end behind a source, in one forward pass without states."""
    length = max(len(source), len(text) + 1)
    rows = [[*source], [EOD, *text]]
    tokens = torch.tensor([[*row, *[EOD] * (length - len(row))] for row in rows])
    positions = torch.arange(length).repeat(2, 1)
    positions[0, len(source) :] = -1
    hidden = model.body((tokens, positions, tokens[:1], torch.tensor([1])))[0]
    logs = model.logits(hidden)[0, :, :VOCAB].log_softmax(-1)
    return sum(logs[place, token].item() for place, token in enumerate([*text, EOD]))


def found(model, sources=SOURCES, **options):
    options = {"eod": EOD, "vocab_size": VOCAB, "most_tokens": MOST, **options}
    by_index = dict(translate(model, sources, **options))
    return [by_index[index] for index in range(len(sources))]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("stack", STACKS)
def test_a_search_with_room_for_all_texts_finds_the_best_of_them(stack, penalty):
    model = build(stack)
    texts = [list(text) for size in range(MOST) for text in product(range(EOD), repeat=size)]
    for source, translation in zip(SOURCES, found(model, beams=Beams(len(texts), penalty), batch_size=1)):
        scores = [log_probability(model, source, text) / (len(text) + 1) ** penalty for text in texts]
        best = max(range(len(texts)), key=scores.__getitem__)
        cut = not translation.is_complete
        assert cut == (len(translation.tokens) == MOST)
        expected = _prefix(model, source, translation.tokens) / MOST**penalty if cut else scores[best]
        assert translation.score == pytest.approx(expected, abs=1e-5)
        assert cut or translation.tokens == texts[best]
        assert translation.score > scores[best] - 1e-5, (
            "a cut text is taken only if no text with an end is better"
        )


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_an_early_bad_end_does_not_hide_a_better_text_without_an_end(length_penalty):
    """As after a few steps with a tokenizer that begins each text with BOS."""
    beams, search = Beams(2, length_penalty), _Search(0)
    for _ in range(MOST):
        logs = torch.full((len(search.tokens), VOCAB), -9.0)
        logs[:, 1], logs[:, EOD] = -0.1, -3.0
        search.step(logs, EOD, beams)
    assert search.ended, "a text must have ended"
    assert search.is_over(beams, MOST)
    assert search.best(beams) == Translation(
        [1] * MOST, pytest.approx(-0.1 * MOST ** (1 - length_penalty)), False
    )


def test_one_beam_takes_the_most_likely_token_each_time():
    model = build("softmax")
    for source, translation in zip(SOURCES, found(model, beams=Beams(1))):
        text = []
        while len(text) < MOST:
            ended = log_probability(model, source, text)
            # What each next token adds: the text with it, less its end, which only shorter texts have.
            goes_on = [_prefix(model, source, [*text, token]) for token in range(EOD)]
            best = max(range(EOD), key=goes_on.__getitem__)
            if ended >= goes_on[best]:
                break
            text.append(best)
        assert translation.tokens == text
        assert translation.is_complete == (len(text) < MOST)


@torch.no_grad()
def _prefix(model, source, text):
    """The log-probability of a text that may go on."""
    length = max(len(source), len(text))
    tokens = torch.tensor([[*row, *[EOD] * (length - len(row))] for row in (source, [EOD, *text[:-1]])])
    positions = torch.arange(length).repeat(2, 1)
    positions[0, len(source) :] = -1
    hidden = model.body((tokens, positions, tokens[:1], torch.tensor([1])))[0]
    logs = model.logits(hidden)[0, :, :VOCAB].log_softmax(-1)
    return sum(logs[place, token].item() for place, token in enumerate(text))


@pytest.mark.parametrize("stack", STACKS)
def test_a_text_does_not_depend_on_the_others_of_its_batch(stack):
    model = build(stack)
    options = {"beams": Beams(3), "most_tokens": 12}
    together = found(model, batch_size=1000, **options)
    assert len({len(text.tokens) for text in together}) > 1, "some texts must leave the batch before others"
    for source, text in zip(SOURCES, together):
        [alone] = found(model, [source], **options)
        assert alone.tokens == text.tokens
        assert alone.score == pytest.approx(text.score, abs=1e-5)
    assert [text.tokens for text in found(model, batch_size=3, **options)] == [x.tokens for x in together]


def test_a_text_without_an_end_is_said_to_be_cut():
    """Without the id of the end among those of the tokenizer, no text has one."""
    texts = found(build("softmax"), vocab_size=EOD)
    assert all(len(text.tokens) == MOST and not text.is_complete for text in texts)
