"""What only the experiments of the four papers use: a folder per paper, and models of others that all compare with.

The long-context system imports nothing from here. `megakernel/config/mechanisms.py` names a layer by its path, and
`megakernel/analysis/plots/catalogue.py` a measurement by its own; both are imported when a preset or `--what` asks for
them. What a paper shares with the system stays with the system, such as kernels of feature maps, keys of mixtures, and
FLuRKA itself. The papers' tasks are in `data_pipeline/papers/`.
"""
