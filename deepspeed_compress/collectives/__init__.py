"""Communication of flat buckets: compressed reduce-scatter, all-reduce and all-gather.

Only this package communicates tensors. Its interface is `reducer.Reducer`; `reduction.Reductions` builds reducers from
settings.
"""
