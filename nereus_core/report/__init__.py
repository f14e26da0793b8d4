"""What people see of a run: a live table, explanations, and a self-contained HTML report.

All of it reads events (`nereus_core.events`) and nothing else.
"""
