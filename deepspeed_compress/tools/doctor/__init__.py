"""`ds-compress doctor`: what holds a run back, and what to change.

run         what a run has left in its directories
case        a run as rules see it: medians, shares, what is known of it
thresholds  where figures begin to mean something, each with its reason
trends      what noisy series do
rule        what a rule is
rules       the rules, by what they look at
ladders     settings one step softer or stronger
patches     changes of a configuration as JSON merge patches
diagnose    all rules over a run
outputs     for people and for programs
command     the command

Nothing here imports torch or deepspeed, and this module nothing at all, because every command of ds-compress loads it.
"""
