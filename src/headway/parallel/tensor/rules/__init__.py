"""Rules of split layers, listed in `parallel.operator_rules`."""
