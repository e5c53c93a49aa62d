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
