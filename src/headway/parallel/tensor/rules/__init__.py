"""Rules: what a function of torch does with parts of tensors; `named.table` has them all."""
