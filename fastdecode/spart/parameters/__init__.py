"""The parameters of a model, made of a checkpoint's tensors.

reader      Parameters: as the checkpoint has them, or rounded one by one
calibrated  CalibratedParameters: rounded to 4 bits for the inputs that a text brings
progress    LoadProgress: tells people how much is loaded
"""
