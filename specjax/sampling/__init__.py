"""Turns logits into the distribution that tokens are drawn from, and draws from it.

Plain code is in `distributions` and `draws`; `draw_kernels` computes the same by Pallas on TPUs,
where that gains by the compiler's own simulation of its instructions.
"""
