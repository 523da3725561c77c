"""How the gradients of a stack of models are computed: several paths with equal results, and the choice of one."""
