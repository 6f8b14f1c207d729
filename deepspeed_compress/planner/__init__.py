"""Prediction of training steps on a cluster before anything starts; standard library only, no torch.

Data flows one way. A `Cluster`, a `Model` and a `Layout` become terms, terms become a `Prediction`, and predictions
are ranked::

    Cluster (gpus, cluster) + Model (model) + Software (software) + Layout (layout)
        -> stages: layers, embedding and head of pipeline stages
        -> compute, traffic (with links): terms of a micro-batch and of a step
        -> schedule: pipeline and overlap -> seconds of a step
        -> memory, learning -> predict: Prediction
    layouts: all layouts, and why others are refused -> search: ranking -> files: configuration and command
    placement: order of nodes, as a hostfile
    sweep: the ranking on other numbers of GPUs and other networks, by setting of compression
    published, calibration: the same prediction for published runs, to fit the constants and to know the error
    probes, measured: the same for measurements of a cluster, to fit the constants to it
    constants, fit: the constants, and the fit that both use
"""
