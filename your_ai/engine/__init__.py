"""How a step's gradients are computed: every engine gives the same ones."""
