"""`ds-compress doctor`: find what slows a run down or harms its loss, and what to change. It loads no torch."""
