"""How the gradients of a stack of models are computed: several ways, equal to the plain one, and a choice."""
