"""Segmentation of volumes by a 3-D U-Net."""
