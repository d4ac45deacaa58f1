"""Closed-form advice of the literature: minibatch, devices, servers, groups, layer algorithms.
`advice` answers from given facts, `plan_advice` finds those facts in a model's graph and a cluster,
`layer_algorithms` chooses algorithms and minibatch under a bound on work space."""
