"""Memory is reserved before it is used: ledger, guard, wait queue, devices. No torch anywhere in here.

The trust boundary is cooperating users of one host: whoever may write in the ledger's directory can block
it, and a program that reserves nothing is seen and counted but never stopped.
"""
