"""Making stages of a model: trace it, choose where to cut, build a module for each stage.

Begin with `cut.cut`. `tracing` records the forward as a torch.fx graph; `stage_modules` chooses
the cut points and builds the stages; `cut` compares them with the model before they are used."""
