"""Calls of every registered operator with wrong arguments, in processes that may crash.

    catalogue.py   what each operator takes and returns, and honest calls: `Operator`, written from the documentation
    changes.py     wrong, or merely unusual, values for each argument of an honest call
    judge.py       runs a call twice, between pages that cannot be read, and says what is wrong with its outcome
    pool.py        runs functions in forked processes; a crash or an endless loop ends only the function
    cases.py       puts them together: a `Case` is an honest call with changed arguments

A call must raise an exception that names the operator and an argument, or return what the definition says.
"""
