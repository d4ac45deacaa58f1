"""Rules of the literature in closed form, and advice by them: devices, servers, groups, algorithms.

`das`, `zou` and `paradl` each hold the formulas of one paper.
`advice` answers from given facts, `plan_advice` finds those facts in a model's graph and a cluster,
`layer_algorithms` chooses algorithms and minibatch under a bound on work space."""
