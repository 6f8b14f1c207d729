"""The only code that communicates: compressed reduce-scatter, all-reduce and all-gather of flat buckets.

Its contract is `reducer.Reducer`; `reduction.Reductions` makes reducers of settings.
"""
