"""Saving and loading sessions, for all kinds of decoding states."""

import pytest

from megakernel.generation import GenerationEngine, Sampling, TextRequest
from megakernel.generation.serving.sessions import Session, fingerprint, from_file, to_file
from tests.serving import random_model
from tests.unit.generation.test_engine import MODELS, prompt

CASES = {
    **MODELS,
    "gated_deltanet": {"attention": "gated_deltanet"},
    "mamba2": {"attention": "mamba2"},
    "mixtures": {"attention": "mgk"},
}


_GROUPS = {
    "preset": "selected",
    "near": {"block_size": 2},
    "selection": {"blocks": 2, "levels": 2, "landmarks": 1},
}


def ids(length):
    return [token % 128 for token in prompt(length)]


def saved_and_read(length, **parts):
    """The engine of a model with these parts, the state of a text of `length` tokens, and that read from its file."""
    loaded_model = random_model(**parts)
    engine = GenerationEngine(loaded_model.model, loaded_model.tokenizer, isolate_documents=True)
    first = engine.add(TextRequest(ids(length), 4, keeps_state=True))
    while first.finish is None:
        engine.step()
    model = fingerprint(loaded_model, loaded_model.model)
    read = from_file(to_file(Session(first.final_state, None), model), engine, loaded_model, model).state
    return engine, first.final_state, read


def test_groups_of_chosen_blocks_are_saved():
    """A file had none of them once: blocks of earlier groups were not found again."""
    _, final, read = saved_and_read(1000, attention=_GROUPS)
    in_memory, from_disk = final.decoder.extract(0), read.decoder.extract(0)
    assert in_memory.states[0].groups.ends.shape[1] > 3
    for token in ids(400):
        assert in_memory.read([[token]]).equal(from_disk.read([[token]]))


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES)
def test_a_text_continues_from_a_saved_session_as_from_memory(parts):
    engine, final, read = saved_and_read(90, **parts)
    sampling = Sampling(temperature=0.7, repetition_penalty=1.3)
    texts = [engine.add(TextRequest([65], 9, sampling, previous=state)) for state in (final, read)]
    while any(text.finish is None for text in texts):
        engine.step()
    assert texts[0].new_tokens == texts[1].new_tokens
    assert read._replace(decoder=None) == final._replace(decoder=None)
