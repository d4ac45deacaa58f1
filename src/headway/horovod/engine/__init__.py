"""The operations of Horovod's interface: matched by name, negotiated at rank 0, executed alike."""
