"""The bundled workloads in the sizes of the golden answers."""

# --- imports to be adapted where the package moves (nothing else here knows its folders) ---
from headway.workloads.cosmoflow import recipe as cosmoflow_recipe
from headway.workloads.resnet import recipe as resnet_recipe
from headway.workloads.transformer import recipe as transformer_recipe
from headway.workloads.unet3d import recipe as unet3d_recipe

# --- end ---


def transformer(**changes):
    return transformer_recipe(**changes)


def resnet(**changes):
    return resnet_recipe(**changes)


def cosmoflow(**changes):
    return cosmoflow_recipe(**changes)


def unet3d(**changes):
    return unet3d_recipe(**changes)
