"""Studies: models that are trained, up-trained, evaluated and compared. A study is one YAML file in this folder.

    python -m benchmarks.experiments --list
    OMP_NUM_THREADS=1 python -m benchmarks.experiments far_context --only local flurka --out far_context.md

To add a study, write `NAME.yaml` here (`recall.yaml` is a short one); `study.py` documents the keys. `config` is a file
that `megakernel pretrain` takes, and each model is a set of overrides of it. The columns of the table are measures of
`measures.py`; a quantity that is not there yet is one more class of its registry. `base/` has configurations, and parts
that several studies extend.
"""
