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


def test_groups_of_chosen_blocks_are_saved():
    """A file had none of them once: blocks of earlier groups were not found again."""
    loaded_model = random_model(attention=_GROUPS)
    engine = GenerationEngine(loaded_model.model, loaded_model.tokenizer, isolate_documents=True)
    first = engine.add(TextRequest([token % 128 for token in prompt(1000)], 4, keeps_state=True))
    while first.finish is None:
        engine.step()
    model = fingerprint(loaded_model, loaded_model.model)
    read = from_file(to_file(Session(first.final_state, None), model), engine, loaded_model, model).state
    more = [token % 128 for token in prompt(400)]
    in_memory, from_disk = first.final_state.decoder.extract(0), read.decoder.extract(0)
    assert in_memory.states[0].groups.ends.shape[1] > 3
    for token in more:
        assert in_memory.read([[token]]).equal(from_disk.read([[token]]))


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES)
def test_a_text_continues_from_a_saved_session_as_from_memory(parts):
    loaded_model = random_model(**parts)
    engine = GenerationEngine(loaded_model.model, loaded_model.tokenizer, isolate_documents=True)
    first = engine.add(TextRequest([token % 128 for token in prompt(90)], 4, keeps_state=True))
    while first.finish is None:
        engine.step()
    model = fingerprint(loaded_model, loaded_model.model)
    read = from_file(to_file(Session(first.final_state, None), model), engine, loaded_model, model).state
    sampling = Sampling(temperature=0.7, repetition_penalty=1.3)
    texts = [
        engine.add(TextRequest([65], 9, sampling, previous=state)) for state in (first.final_state, read)
    ]
    while any(text.finish is None for text in texts):
        engine.step()
    assert texts[0].new_tokens == texts[1].new_tokens
    assert read._replace(decoder=None) == first.final_state._replace(decoder=None)
