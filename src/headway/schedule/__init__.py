"""Pipeline schedules as tables of actions: generators, check, timing, lowering, CSV."""
