"""Pure maths, tensors in and tensors out: estimators U, preconditioners V, proximal maps, schedules."""
