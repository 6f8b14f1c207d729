"""Prediction of training steps on a cluster before anything starts; standard library only, no torch.

Data flows one way. A `Cluster`, a `Model` and a `Layout` become terms, terms become a `Prediction`, and predictions
are ranked::

    Cluster (gpus, cluster) + Model (model) + Software (software) + Layout (layout: all of them, and their stages)
        -> compute, traffic (with links of cluster): terms of a micro-batch and of a step
        -> schedule: pipeline and overlap -> seconds of a step
        -> predict: memory, Prediction
        -> search: additional tokens, ranking -> choices: what a user can choose from
        -> files: configuration and command
    measured: probes and steps of a cluster, and the fit of the constants to them
"""
