"""What a session's file keeps of a text, whatever its layers keep."""

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
def test_a_text_goes_on_from_a_file_as_from_memory(parts):
    opened = random_model(**parts)
    engine = GenerationEngine(opened.model, opened.tokenizer, isolate_documents=True)
    first = engine.add(TextRequest([token % 128 for token in prompt(90)], 4, keeps_state=True))
    while first.finish is None:
        engine.step()
    model = fingerprint(opened, opened.model)
    read = from_file(to_file(Session(first.final_state, None), model), engine, opened, model).state
    likely = Sampling(temperature=0.7, repetition_penalty=1.3)
    texts = [engine.add(TextRequest([65], 9, likely, previous=state)) for state in (first.final_state, read)]
    while any(text.finish is None for text in texts):
        engine.step()
    assert texts[0].new_tokens == texts[1].new_tokens
    assert read._replace(decoder=None) == first.final_state._replace(decoder=None)
