"""How tensors are exchanged, as data: nodes, link fits, fusion, order, bytes on the wire."""
