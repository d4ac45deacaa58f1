"""Rules of the literature in closed form: how many devices, servers, samples, groups."""
