"""Classification of images by residual networks."""
