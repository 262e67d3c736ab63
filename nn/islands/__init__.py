"""Islands: ranks that outlive the scripts that use them. Clients, processes of their own, send them programs.

    client a  --programs-->  scheduler  --one order-->  worker 0, worker 1, ...   one a rank, of one world
    client b  --programs-->  (rank 0)   <--reports----  results stay there, under numbers

messages   all that is said, and the line by which it goes
pickles    programs and results on their way: functions by name, handles by number, global tensors whole
scheduler  clients and workers of an island, and the one order of all programs: whose is next
worker     what a rank does: it runs programs and keeps their results
serve      an island from its start to its end, and the file by which clients find it
client     `flow.island`: what a client sees
"""
