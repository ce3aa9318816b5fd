"""How weights and K lose less when they become integers of 4 or 8 bits.

gptq         quantisation that corrects later inputs for the errors of earlier ones (GPTQ)
calibration  the inputs of linears, measured on a text
balance      matrices by which Q and K are multiplied
probe        a step without R-nodes, for both measurements
"""
