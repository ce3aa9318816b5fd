"""What a step is given and what it returns; the scheduler knows no more of the S-Part.

batch       a step's work, as the scheduler hands it to the S-Part, and its results
step_table  a step's numbers for its device in one upload, and its results in one download
masks       the tokens that a row may draw at all
penalties   the bias and the penalties that a request puts on tokens
"""
