------------------------------- MODULE Cache -------------------------------
\* A twin of the lens `cache` of kvproof: pool, copy-on-write, prefix cache and swap, one action for each call.
\* TLC counts its states; `kvproof spec explore --lens cache` counts as many.
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS Blocks, Seqs, BlockSize, MaxTokens, Tokens, HostBlocks

VARIABLES free,     \* the free blocks, the one that will be taken next first
          place,    \* where a sequence is: "nowhere", "device" or "host"
          tokens,   \* the tokens of a sequence; K and V of all of them are computed
          table,    \* its block table
          key,      \* the prefix by which a block can be found in the cache, or << >>
          cells     \* what the slots of a block hold: the prefixes that end there

vars == <<free, place, tokens, table, key, cells>>

Range(f) == {f[i] : i \in DOMAIN f}
Needed(n) == (n + BlockSize - 1) \div BlockSize
Prefix(t, n) == SubSeq(t, 1, n)
Lines(n) == UNION {[1..k -> Tokens] : k \in 1..n}
Reverse(t) == [i \in 1..Len(t) |-> t[Len(t) + 1 - i]]
Running == {s \in Seqs : place[s] = "device"}
Unused == {s \in Seqs : place[s] = "nowhere"}
Holders(b) == {s \in Seqs : b \in Range(table[s])}
HostFree == HostBlocks - Cardinality(UNION {{<<s, i>> : i \in 1..Needed(Len(tokens[s]))} : s \in {q \in Seqs : place[q] = "host"}})

\* What block i of a line of tokens holds when all of them are computed.
Held(t, i) == [j \in 1..(IF i * BlockSize <= Len(t) THEN BlockSize ELSE Len(t) - (i - 1) * BlockSize) |-> Prefix(t, (i - 1) * BlockSize + j)]

\* The longest cached prefix; the last token is always computed.
Found(t, i) == {b \in Blocks : key[b] = Prefix(t, i * BlockSize)}
NumHits(t) == LET full == (Len(t) - 1) \div BlockSize
              IN CHOOSE n \in 0..full : /\ \A i \in 1..n : Found(t, i) # {}
                                        /\ n < full => Found(t, n + 1) = {}
Hits(t) == [i \in 1..NumHits(t) |-> CHOOSE b \in Found(t, i) : TRUE]

Forget(f, bs) == [b \in Blocks |-> IF b \in bs THEN << >> ELSE f[b]]

\* A table is given back, its last block first; nobody else may hold the block. Only what is cached keeps its contents.
Given(s) == LET Alone(b) == Holders(b) = {s} IN SelectSeq(Reverse(table[s]), Alone)
Emptied(s) == {b \in Range(Given(s)) : key[b] = << >>}

Init == /\ \E order \in [1..Cardinality(Blocks) -> Blocks] : /\ Range(order) = Blocks
                                                             /\ free = order
        /\ place = [s \in Seqs |-> "nowhere"]
        /\ tokens = [s \in Seqs |-> << >>]
        /\ table = [s \in Seqs |-> << >>]
        /\ key = [b \in Blocks |-> << >>]
        /\ cells = [b \in Blocks |-> << >>]

Allocate(s, t) ==
    LET hits == Hits(t)
        left == SelectSeq(free, LAMBDA b : b \notin Range(hits))
        count == Needed(Len(t)) - Len(hits)
        new == SubSeq(left, 1, count)
        all == hits \o new
    IN /\ place[s] = "nowhere"
       /\ count <= Len(left)
       /\ free' = SubSeq(left, count + 1, Len(left))
       /\ place' = [place EXCEPT ![s] = "device"]
       /\ tokens' = [tokens EXCEPT ![s] = t]
       /\ table' = [table EXCEPT ![s] = all]
       /\ key' = Forget(key, Range(new))
       /\ cells' = [b \in Blocks |-> IF \E i \in 1..Len(new) : new[i] = b
                                     THEN Held(t, Len(hits) + (CHOOSE i \in 1..Len(new) : new[i] = b))
                                     ELSE cells[b]]

\* One token. It goes into the last block, into a copy of it if the block is shared or cached, or into a new one.
AppendToken(s, token) ==
    LET t == tokens[s] \o <<token>>
        old == table[s]
        last == old[Len(old)]
        grows == Len(tokens[s]) % BlockSize = 0
        copies == ~grows /\ (Cardinality(Holders(last)) > 1 \/ key[last] # << >>)
        target == IF grows \/ copies THEN Head(free) ELSE last
    IN /\ place[s] = "device"
       /\ Len(t) <= MaxTokens
       /\ (grows \/ copies) => free # << >>
       /\ free' = IF grows THEN Tail(free) ELSE IF ~copies THEN free
                  ELSE IF Holders(last) = {s} THEN Tail(free) \o <<last>> ELSE Tail(free)
       /\ tokens' = [tokens EXCEPT ![s] = t]
       /\ table' = [table EXCEPT ![s] = IF grows THEN old \o <<target>> ELSE [old EXCEPT ![Len(old)] = target]]
       /\ key' = IF target = last THEN key ELSE Forget(key, {target})
       /\ cells' = [cells EXCEPT ![target] = (IF grows THEN << >> ELSE cells[last]) \o <<t>>]
       /\ UNCHANGED place

Fork(s, child) == /\ place[s] = "device"
                  /\ place[child] = "nowhere"
                  /\ place' = [place EXCEPT ![child] = "device"]
                  /\ tokens' = [tokens EXCEPT ![child] = tokens[s]]
                  /\ table' = [table EXCEPT ![child] = table[s]]
                  /\ UNCHANGED <<free, key, cells>>

Release(s) == /\ place[s] # "nowhere"
              /\ free' = free \o Given(s)
              /\ place' = [place EXCEPT ![s] = "nowhere"]
              /\ tokens' = [tokens EXCEPT ![s] = << >>]
              /\ table' = [table EXCEPT ![s] = << >>]
              /\ cells' = Forget(cells, Emptied(s))
              /\ UNCHANGED key

SwapOut(s) == /\ place[s] = "device"
              /\ Len(table[s]) <= HostFree
              /\ free' = free \o Given(s)
              /\ place' = [place EXCEPT ![s] = "host"]
              /\ table' = [table EXCEPT ![s] = << >>]
              /\ cells' = Forget(cells, Emptied(s))
              /\ UNCHANGED <<tokens, key>>

SwapIn(s) ==
    LET count == Needed(Len(tokens[s]))
        new == SubSeq(free, 1, count)
    IN /\ place[s] = "host"
       /\ count <= Len(free)
       /\ free' = SubSeq(free, count + 1, Len(free))
       /\ place' = [place EXCEPT ![s] = "device"]
       /\ table' = [table EXCEPT ![s] = new]
       /\ key' = Forget(key, Range(new))
       /\ cells' = [b \in Blocks |-> IF b \in Range(new)
                                     THEN Held(tokens[s], CHOOSE i \in 1..count : new[i] = b)
                                     ELSE cells[b]]
       /\ UNCHANGED tokens

\* Every full block can be found from now on, unless another block is found under the same prefix.
Publish(s) ==
    LET full == 1..(Len(tokens[s]) \div BlockSize)
        fresh == {i \in full : Found(tokens[s], i) = {}}
    IN /\ place[s] = "device"
       /\ key' = [b \in Blocks |-> IF \E i \in fresh : table[s][i] = b
                                   THEN Prefix(tokens[s], BlockSize * (CHOOSE i \in fresh : table[s][i] = b))
                                   ELSE key[b]]
       /\ UNCHANGED <<free, place, tokens, table, cells>>

Reset == LET named == {b \in Blocks : key[b] # << >>}
         IN /\ named # {}
            /\ \A b \in named : Holders(b) = {}
            /\ key' = Forget(key, named)
            /\ cells' = Forget(cells, named)
            /\ UNCHANGED <<free, place, tokens, table>>

Next == \/ \E s \in Seqs : \/ \E t \in Lines(MaxTokens) : Allocate(s, t)
                           \/ \E token \in Tokens : AppendToken(s, token)
                           \/ \E child \in Seqs : Fork(s, child)
                           \/ Release(s) \/ SwapOut(s) \/ SwapIn(s) \/ Publish(s)
        \/ Reset

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
\* What must hold.

FreeMeansUnheld == /\ Len(free) = Cardinality(Range(free))
                   /\ \A b \in Blocks : b \in Range(free) <=> Holders(b) = {}
TablesFit == \A s \in Seqs : /\ Len(table[s]) = (IF place[s] = "device" THEN Needed(Len(tokens[s])) ELSE 0)
                             /\ Len(table[s]) = Cardinality(Range(table[s]))
SlotsHoldTheirPrefix == \A s \in Running : \A i \in 1..Len(table[s]) : cells[table[s][i]] = Held(tokens[s], i)
CachedBlocksHoldTheirKey ==
    \A b \in Blocks : key[b] # << >> => /\ Len(key[b]) % BlockSize = 0
                                        /\ cells[b] = Held(key[b], Len(key[b]) \div BlockSize)
KeysAreDistinct == \A a, b \in Blocks : a # b /\ key[a] # << >> => key[a] # key[b]
HostHasRoom == HostFree >= 0

----------------------------------------------------------------------------
\* When two states count as one: if a renaming of blocks and of sequences makes one of the other, and prefixes agree for
\* equally many tokens. The view of a state is the set of all its renamings, so equal views are what is meant.

Things == Seqs \cup Blocks
Line(x) == IF x \in Seqs THEN tokens[x] ELSE key[x]
Common(x, y) == LET t == Line(x) u == Line(y) IN Cardinality({n \in 1..Len(t) : n <= Len(u) /\ Prefix(t, n) = Prefix(u, n)})
Inverse(f) == [y \in Range(f) |-> CHOOSE x \in DOMAIN f : f[x] = y]
Renamings == {f @@ g : f \in Permutations(Seqs), g \in Permutations(Blocks)}
Pairs == {<<f, Inverse(f)>> : f \in Renamings}

View == LET common == [p \in Things \X Things |-> Common(p[1], p[2])]
            Named(f, back) == <<[i \in DOMAIN free |-> f[free[i]]],
                                [s \in Seqs |-> place[back[s]]],
                                [s \in Seqs |-> [i \in DOMAIN table[back[s]] |-> f[table[back[s]][i]]]],
                                [p \in Things \X Things |-> common[<<back[p[1]], back[p[2]]>>]]>>
        IN {Named(p[1], p[2]) : p \in Pairs}
=============================================================================
