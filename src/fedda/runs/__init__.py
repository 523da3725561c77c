"""The run folder: its files (`names`), its writer (`folder`) and its reader (`reading`). Nothing here imports torch."""
