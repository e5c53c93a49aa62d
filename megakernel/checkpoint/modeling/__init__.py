"""The model of an export, written for readers of `modeling_megakernel.py`: torch and `transformers` alone.

`joined.py` joins the parts that a model needs into that file. Nothing else of this package is imported here. Classes
have the names that the package has for the same things: a reader of the file knows them, and never sees both.
"""
