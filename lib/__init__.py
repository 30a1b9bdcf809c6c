"""How sparse attention emerges: tasks, models, the training loop, theory and probes behind the book's chapters."""
