"""Output of diagnostics, for people at a terminal and for programs.

report    contents of the report on one run of a tool, texts of its rules; full, concise and statistics for terminals
machine   json, in the form of each tool; github; sarif
"""
