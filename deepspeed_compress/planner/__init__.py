"""Prediction of training steps on a cluster before anything starts; standard library only, no torch.

Data flows one way. A `Cluster`, a `Model` and a `Layout` become terms, terms become a `Prediction`, and predictions
are ranked::

    Cluster (gpus, cluster) + Model (model) + Software (software) + Layout (layout, with its pipeline stages)
        -> compute, traffic (with links): terms of a micro-batch and of a step
        -> schedule: pipeline and overlap -> seconds of a step
        -> predict: memory, Prediction; learning: additional tokens
    layouts: all layouts, and why others are refused -> search: ranking -> files: configuration and command
    cluster: also the order of nodes, as a hostfile
    sweep: the ranking on other numbers of GPUs and other networks, by setting of compression
    constants: the constants, and their fit to measured seconds
    measured: probes and steps of a cluster, to fit the constants to it
"""
