from megakernel.training.resume import in_layers


def test_equal_names_of_several_layers_are_joined():
    names = ["1.core.mass", "2.core.mass", "10.core.mass", "2.core.gate", "tied_modules.embedding.weight"]
    assert in_layers(names) == "{1,2,10}.core.mass, 2.core.gate, tied_modules.embedding.weight"
