"""Two hundred public bugs of serving engines, one by one: where each is told, what it broke, and what is out of scope here."""

from collections.abc import Mapping
from dataclasses import dataclass

from spec.corpus import CORPUS, Way

CLASSES: Mapping[int, tuple[str, int]] = {
    1: ("allocator and free list", 1),
    2: ("block table and slot mapping", 30),
    3: ("fork, copy-on-write, samples", 55),
    4: ("prefix cache", 75),
    5: ("preemption", 120),
    6: ("scheduler", 150),
    7: ("attention kernels and cache writes", 185),
    8: ("sampling, text, interface", 225),
}
"""The classes, each with the number of its first bug."""


@dataclass(frozen=True)
class Bug:
    """A bug: its id here, the public issues or advisories that tell of it, the invariants that it broke, and what was
    seen. ``out`` says why nothing here can have it."""

    id: str
    sources: tuple[str, ...]
    invariants: tuple[str, ...]
    seen: str
    out: str = ""

    @property
    def number(self) -> int:
        return int(self.id.partition("-")[2])

    @property
    def bug_class(self) -> int:
        return max(number for number, (_, first) in CLASSES.items() if first <= self.number)

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that cover its invariants."""
        cited = (rule for each in self.invariants for rule in CORPUS[each].rules)
        return tuple(dict.fromkeys(cited))

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that cover what no rule of its invariants says."""
        return tuple(dict.fromkeys(test for each in self.invariants for test in CORPUS[each].tests))


_NO_IMAGES = "Prompts are tokens of text: there are no images."
_NO_ADAPTERS = "An engine serves one model, without adapters."
_NO_TIERS = "A prefix is cached in the pool itself: there is no second tier and no transfer between engines."
_NO_DRAFTS = "A sequence gets one token a step: there are no drafts."
_ONE_CACHE = "All layers have one cache of one kind: there are no groups with tables of their own."

OUT: Mapping[str, str] = {
    **dict.fromkeys(("B-080", "B-081"), _NO_IMAGES),
    **dict.fromkeys(("B-082", "B-083", "B-087"), _NO_ADAPTERS),
    **dict.fromkeys(("B-137", "B-138"), _NO_TIERS),
    **dict.fromkeys(("B-131",), _NO_DRAFTS),
    **dict.fromkeys(("B-009", "B-010", "B-032"), _ONE_CACHE),
    "B-178": "Ids are the caller's: no counter of requests lives on between two calls.",
    "B-253": "An answer has no hidden sections.",
}
"""Bugs that nothing here can have, as they were told, and why. Some have a mutant all the same, which breaks the same
invariant in another way."""

BUGS: Mapping[str, Bug] = {
    fields[0]: Bug(
        fields[0], tuple(fields[1].split(",")), tuple(fields[2].split(",")), fields[3], OUT.get(fields[0], "")
    )
    for line in """
B-001 vllm-project/vllm#1556,vllm-project/vllm#3347 A2,A3,C3 double free exception, engine loop dies
B-002 vllm-project/vllm#42571 A1,A3 Free counter exceeds the pool, list corrupt, later allocations fail
B-003 ModelEngine-Group/unified-cache-management#1053 A3,A4 Assertion when popping n blocks, long after the fault
B-004 vllm-project/vllm-ascend#15990 A1,P7 Allocation fails inside the free queue
B-005 vllm-project/vllm#11168,vllm-project/vllm#17834 A7 no free blocks raised from allocate, loop dies
B-006 vllm-project/vllm#20569 A6 Pool shrinks after failed allocations
B-007 vllm-project/vllm#11562,vllm-project/vllm#11565 A6,P7,S3 Assertion nothing scheduled, or stall
B-008 vllm-project/vllm#11565 A7 Would over-admit
B-009 vllm-project/vllm#45856,vllm-project/vllm#41282 A7 cannot get N free blocks, engine core dies, all requests 500
B-010 sgl-project/sglang#16067,sgl-project/sglang#15840 A5,A6 Idle leak check raises and kills the scheduler
B-011 sgl-project/sglang#27586 A2,T5 One page leaks at a time until an invariant check aborts
B-012 sgl-project/sglang-jax#982,sgl-project/sglang#12224 A5,A1 Leak check fails after ONE plain request
B-013 sgl-project/sglang#35270 P12 evictable exceeds pool size, server dies when idle
B-014 sgl-project/sglang#4987 A11 Evicts far more than asked
B-015 UbiquitousLearning/mllm#656 P12 evictable size goes negative
B-016 vllm-project/vllm#32255 A9,A5 Another request's KV corrupted; after the fix a leak
B-017 vllm-project/vllm#46283 A5,S6 Aborted requests keep their blocks, nothing is admitted any more
B-018 vllm-project/vllm-ascend#10843 A5 Usage climbs monotonically to 100%
B-019 vllm-project/vllm#45357 A9 Freshly filled KV overwritten
B-020 PaddlePaddle/FastDeploy#3710 A3,A5 Scheduler state wrong after reuse
B-021 ggml-org/llama.cpp#25566 A5 context size exceeded once the SUM of finished prompts passes the pool
B-022 NVIDIA/TensorRT-LLM#16072 T4,A7 Permanent slow path after one busy moment
B-023 huggingface/transformers#43150 R5,S3 Error thrown when KV is full
B-024 InternLM/lmdeploy#4292 P3 Engine crash with prefix caching
B-030 Wenyueh/MinivLLM#76 T2,T3 New K/V written to the wrong slot; block hash over the whole sequence
B-031 MDK8888/vllmini#2 T2 Slots of different blocks overlap
B-032 vllm-project/vllm#53982,vllm-project/vllm#54296 T6 GPU memory fault, or slot taken from the neighbour's row
B-033 vllm-project/vllm#42494 T7,K2 May read stale entries
B-034 vllm-project/vllm#42273 T5,T7 Real output corruption with quantised KV
B-035 vllm-project/vllm#7018,vllm-project/vllm#7003 T5,P11 Wrong output / illegal access, only in mixed batches
B-036 huggingface/text-generation-inference#2711 T2,T8 Wrong output, sometimes device assert
B-037 vllm-project/vllm#35431,vllm-project/vllm#35336 T4 State corruption with graph padding
B-038 vllm-project/vllm#43810,vllm-project/vllm#43869 T4 Last cell of the cache overwritten by padding
B-039 InternLM/lmdeploy#4569 T4 KV polluted
B-040 m0at/rvllm#32 T4 Padded rows touch live slot 0
B-041 vllm-project/vllm-ascend#9139 T1,S9 Key length one block beyond the row
B-042 GeeeekExplorer/nano-vllm#207,GeeeekExplorer/nano-vllm#211 T1,P14 IndexError while preparing prefill
B-043 GeeeekExplorer/nano-vllm#207 S4,A6 Blocks held by a waiting request
B-044 GeeeekExplorer/nano-vllm#65,GeeeekExplorer/nano-vllm#66 T1,T3 Repeatedly reported as a bug, mostly is not
B-045 vllm-project/vllm#27547 T2 Accuracy falls to 2%
B-046 vllm-project/vllm#13922 T4,T6 Crash / wrong writes on padded batches
B-047 vllm-project/vllm-ascend#14714 T4 Crash when the batch drains through one size
B-048 flashinfer-ai/flashinfer#320 T3,T6 Silently accepted
B-049 HabanaAI/vllm-fork#12 T1 Fetches far too many blocks
B-055 vllm-project/vllm#417 C2,C3 Wrong text with several samples
B-056 vllm-project/vllm#344,vllm-project/vllm#644 C2 Beam texts contain words of other beams
B-057 vllm-project/vllm#20512 C3,A2 Fork asserts, or child silently adopts a foreign block
B-058 vllm-project/vllm#11898 C5,C6 With a seed all n samples equal; later samples lost
B-059 vllm-project/vllm#14512 C5,S6 n>1 never finishes / abort ignored
B-060 vllm-project/vllm#16863,vllm-project/vllm#12584 C5 Choices overwrite each other
B-061 vllm-project/vllm#52398,vllm-project/vllm#52399 C5 Fewer than n choices, no error
B-062 vllm-project/vllm#31081,vllm-project/vllm#47126 C2,X9 Beam index out of range or wrong parent
B-063 vllm-project/vllm#21519,vllm-project/vllm#29764 S5,X1 Engine crash, priority policy with n>1
B-064 huggingface/transformers#46117 C7,A6 Server crash while forking
B-065 huggingface/transformers#42921 C1,C2 (feature) one copy per child of the partial block
B-066 openvinotoolkit/openvino.genai#799 R10,C3 Wrong number of blocks released in beam groups
B-067 openvinotoolkit/openvino.genai#4332 A5,S6 Assertion during partial preemption
B-068 openvinotoolkit/openvino.genai#2541 C4 Copies repeated layers-squared times
B-069 pie-project/pie#462,pie-project/pie#418 C4 Garbage right after any fork
B-070 vllm-project/vllm#10980 C6 Same seed duplication would recur
B-075 vllm-project/vllm#12621,GHSA-rm76-4mrf-v9r8 P2,P1 A request can be served with KV of other content
B-076 vllm-project/vllm#15297 P2 Rare accidental collisions
B-077 NVIDIA/Megatron-LM#4158 P2 Constructible collision
B-078 vllm-project/vllm#54727 P2 Optional fast hash can be poisoned
B-079 InternLM/lmdeploy#3353 P2 (defence already there)
B-080 PYSEC-2025-43 P2 Two images share cache entries
B-081 ROCm/ATOM#1358 P2 Wrong image answered, then worker dies
B-082 vllm-project/vllm#3264,vllm-project/vllm#3263 P2,P11 Adapter B uses adapter A's KV
B-083 vllm-project/vllm#42495 P2 After reloading an adapter under the same name the old KV is used
B-084 CVE-2025-46570,vllm-project/vllm#16016 P10 Timing tells whether somebody else used a prefix
B-085 LMCache/LMCache#2878,LMCache/LMCache#3008 P10,P2 Salted requests share KV in the second tier
B-086 CVE-2026-105756 X1,X2 One request with a strange salt kills the engine
B-087 vllm-project/vllm#52655 P2 Salt could equal an adapter name
B-088 GeeeekExplorer/nano-vllm#144,GeeeekExplorer/nano-vllm#199 P6 Crash: zero query tokens
B-089 ggml-org/llama.cpp#1609,ggml-org/llama.cpp#5420 P6,P14 Non-deterministic second answer
B-090 vllm-project/vllm#11186,vllm-project/vllm#17999 P6,P9 Hash chain broken, lower hit rate
B-091 ai-dynamo/dynamo#13312 P6,P9 One block too little reused
B-092 GeeeekExplorer/nano-vllm#163 P3,P1 Hit returns a block with other content
B-093 vllm-project/vllm#4764,vllm-project/vllm#4761 P3,C1 Cached block handed out twice
B-094 vllm-project/vllm#5364 P4 Uncomputed block skipped
B-095 ovg-project/kvcached#362,ovg-project/kvcached#363 P3 Stale hash on a reused block object
B-096 ovg-project/kvcached#401,ovg-project/kvcached#402 P3 Engine dies on hash is not None
B-097 vllm-project/vllm#55092 P3,P13 External index thinks the prefix is gone
B-098 vllm-project/vllm#49125 P3,P5 Superseded partial key returns a hit
B-099 GeeeekExplorer/nano-vllm#208,GeeeekExplorer/nano-vllm#209 P4 Second sequence reuses blocks not computed yet
B-100 vllm-project/vllm#7822,vllm-project/vllm#7619 P4,P9 Hits only after the first request has ended
B-101 sgl-project/mini-sglang#52 P7 In-use node evicted
B-102 vllm-project/vllm#10507 A10,P7 Own hit evicted
B-103 vllm-project/vllm#42948 A10,P7 0% hits on repeat
B-104 NVIDIA/TensorRT-LLM#699 P8,A10 Assertion about child blocks when many requests run
B-105 sgl-project/sglang#10637 P5,P12 Empty key after page truncation; size counters drift
B-106 antonellof/ferrox#37 P14,P11 Every batched hit gives wrong logits
B-107 waybarrios/vllm-mlx#380,waybarrios/vllm-mlx#385 P1,K2 Answer about another user's text
B-108 vllm-project/vllm#25780,vllm-project/vllm#25787 P9 30% hit rate on random data
B-109 vllm-project/vllm#43736,vllm-project/vllm#45202 P9 Hit rate inflated
B-110 kekzl/imp#1189 P1,K8 Restored prefix decodes to plausible nonsense
B-111 vllm-project/vllm#57610 P9,K6 Full miss after a small edit
B-112 vllm-project/vllm#3251 P11,X9 Crash, later stale numbers, for prompt logprobs with caching
B-120 vllm-project/vllm#3032,vllm-project/vllm#5349 R2,R1 Broken state after recompute
B-121 GeeeekExplorer/nano-vllm#144 R4 Decode path taken for a resumed prefill
B-122 GeeeekExplorer/nano-vllm#274,GeeeekExplorer/nano-vllm#277 S2,R5 Assertion in decode; naive fix hangs
B-123 vllm-project/vllm#21809,vllm-project/vllm#21793 R5,A7 Requests restart, fill, get preempted, endlessly
B-124 inference-sim/inference-sim#297 R5,S3,A1 Simulator livelock / deadlock, three variants
B-125 vllm-project/vllm-ascend#16315,vllm-project/vllm#49675 R5,R10,A9 0 tokens/s, everything preempted
B-126 vllm-project/vllm#787,vllm-project/vllm#588 R7,X1 lack of CPU swap space aborts the whole engine
B-127 vllm-project/vllm#5578 S8,R7 CPU pool fills up
B-128 vllm-project/vllm#4557 S2,R7 Swapped request never returns, hangs
B-129 vllm-project/vllm#546 S3,R7 All processing stops once CPU cache is used; swap_space=0 aborts at first preemption
B-130 guoqingbao/xinfer#69 S5 Swapped-out sequence never swapped in
B-131 sgl-project/sglang#14939,sgl-project/sglang#14942 R10 OOM right after retraction
B-132 sgl-project/sglang#4977,sgl-project/sglang#9989 R10,A1 Leak, or not enough freed, when page size > 1
B-133 sgl-project/sglang#19881 S2,X1 Last request kills the server
B-134 vllm-project/vllm#38624 R9,R1 Duplicate token after resume, negative counter assertion, or late stop
B-135 vllm-project/vllm#42117,vllm-project/vllm#42043 R9,R3 First token after resume is lost
B-136 vllm-project/vllm-gaudi#1794 R5,R9 Same text, three times the preemptions
B-137 LMCache/LMCache#2158,vllm-project/vllm#18631 R4,P14 Negative number of tokens to load; assertion
B-138 LMCache/LMCache#1361 R2 Token history of the tracker wrong after resume
B-139 vllm-project/vllm-ascend#11313 S11,R2 Sampled token kept or dropped wrongly on resume
B-140 vllm-project/vllm#28558 R6 Stale draft tokens for a preempted request
B-141 openvinotoolkit/openvino.genai#574 A7 Slots thought appendable
B-150 vllm-project/vllm#39734,vllm-project/vllm#39828 S2,S3 Waiting 1, running 0, for ever; everything behind blocked
B-151 m87-labs/kestrel#135 S2,X1 Engine shut down by one unadmittable request
B-152 vllm-project/vllm#35852,vllm-project/vllm#31731 S8 Small requests wait behind a big one
B-153 vllm-project/vllm#57104,vllm-project/vllm#57841 S4,S3 Permanent deadlock under pressure
B-154 vllm-project/vllm#53130 S3,S10 No admission although cache is free
B-155 sgl-project/sglang#24359 S10 Prefill stalls until somebody finishes
B-156 vllm-project/vllm#23347,vllm-project/vllm#23713 R6,S5 Assertion: scheduled > running
B-157 vllm-project/vllm#26765 S8 Other runnable requests not scheduled
B-158 vllm-project/vllm#9272,vllm-project/vllm#9342 S5,X1 Engine crash at first priority preemption
B-159 vllm-project/vllm#45561,vllm-project/vllm#40004 S8 Priority inversion
B-160 vllm-project/vllm#41951 S8 Preempted request overtaken, its cache evicted
B-161 vllm-project/vllm#55130,vllm-project/vllm-metal#199 S7,S2 Prompts over the budget wait for ever
B-162 sgl-project/sglang-jax#1551 S7,S1 Scheduler dies
B-163 sgl-project/sglang#30743 S1,A7 Server-wide OOM exits
B-164 sgl-project/sglang#13698 S1 Negative length
B-165 RBLN-SW/vllm-rbln#499 S1 First chunk one token short, later chunks misaligned
B-166 ROCm/ATOM#408 S1 Budget exceeded
B-167 vllm-project/vllm#42157,vllm-project/vllm#53799 S6,X1 KeyError / bad status kills engine
B-168 sgl-project/sglang#21173 S6 KeyError in the front process
B-169 vllm-project/vllm#6586 S6 Loop stops when requests are aborted (several batches in flight)
B-170 vllm-project/vllm#56841 S6 Crash when a queued request is aborted
B-171 vllm-project/vllm#40302 S7,S9 Assertion, engine dead
B-172 vllm-project/vllm#12600,vllm-project/vllm#12567 S9,X1 Over-long prompt crashes v1
B-173 vllm-project/vllm#7632,vllm-project/vllm#7746 S9,X1 Empty prompt kills the server
B-174 vllm-project/vllm#52693 S5,S9 Engine death on a turn that yields no token
B-175 vllm-project/vllm#6521 S9,X1 max_tokens=0 with echo crashes
B-176 vllm-project/vllm#15041 X2,S5 Duplicate request id crashes v1
B-177 sgl-project/sglang#34676 A7,A11 Prefill OOM although plenty is evictable
B-178 huggingface/transformers#45943 X5,S5 Second call returns missing results
B-185 vllm-project/vllm#936,vllm-project/vllm#641 K2 NaN
B-186 Dao-AILab/flash-attention#1745 K2 Newer kernel generation lost this protection
B-187 ROCm/aiter#5401 K2 Non-finite output after slot reuse
B-188 vllm-project/vllm#47305 K2 Garbage after a warm-up run
B-189 deepbeepmeep/Wan2GP#1628 K2 NaN although masked with -inf
B-190 hw-native-sys/simpler#72 K1,K10 Garbage weights
B-191 sgl-project/sglang#32477,sgl-project/sglang#35351 T4,K2 NaN in production
B-192 vllm-project/vllm#50427,vllm-project/vllm#50483 K5 Illegal access or silently wrong
B-193 vllm-project/vllm#47671 K5 Crash above a certain block id
B-194 vllm-project/vllm-xpu-kernels#445,ROCm/aiter#4427 K5 Page fault; NaN/Inf logits
B-195 syv-ai/qwen38-27b-rtx3090#86,syv-ai/qwen38-27b-rtx3090#91 K5 Fault on first step after a long cached prefix
B-196 Dao-AILab/flash-attention#1217,Dao-AILab/flash-attention#2550 K4 Wrong when split > 1 with paged + var-len
B-197 pytorch/torchtitan#3235 K4 NaN in about 1% of decode steps
B-198 flagos-ai/FlagGems#5235 K9,K10 Out-of-bounds write in the combine step
B-199 Dao-AILab/flash-attention#1647 K4 Result differs with 16 or 32 splits
B-200 vllm-project/flash-attention#87 K4 LSE permuted
B-201 flashinfer-ai/flashinfer#4051,flashinfer-ai/flashinfer#4054 K3 NaN when all parts are empty
B-202 flashinfer-ai/flashinfer#4452 K3 Finite LSE for fully masked rows
B-203 Dao-AILab/flash-attention#978 K3 LSE = +inf for empty rows
B-204 vllm-project/vllm#4405 K6,K3 NaN
B-205 vllm-project/vllm#3385 K6 One token fewer than the reference model
B-206 vllm-project/vllm#4768 K6 A few tokens too many attended
B-207 vllm-project/vllm#4128 K7 Head sizes other than powers of two rejected / wrong
B-208 vllm-project/vllm#23424 K7 Division by zero
B-209 flashinfer-ai/flashinfer#2849,flashinfer-ai/flashinfer#2895 K7 Illegal access for group >= 16
B-210 ROCm/aiter#2190 K7 Crash
B-211 flashinfer-ai/flashinfer#4347,flashinfer-ai/flashinfer#3849 K7,K1 Wrong for page size > 128
B-212 flashinfer-ai/flashinfer#1204 K9 Wrong for 3-D cache with page > 1; wrong for non-contiguous cache
B-213 flashinfer-ai/flashinfer#1023,flashinfer-ai/flashinfer#4979 K8 fp8 scales ignored
B-214 sgl-project/sglang#20705 K8 Scales silently 1.0 or crash
B-215 kekzl/imp#89 K8 Degenerate text with fp8 KV
B-216 vllm-project/vllm#4381 K8,K1 Chunked prefill with fp8 KV fails
B-217 Dao-AILab/flash-attention#708 K1 Error for short prompts with GQA
B-225 vllm-project/vllm#3572,vllm-project/vllm#3672 X3 Stop string missed
B-226 vllm-project/vllm#3574,vllm-project/vllm#2577 X3 Part of the stop string streamed
B-227 vllm-project/vllm#31135,vllm-project/vllm#45636 X5 Chunks split tokens; text, ids, logprobs disagree
B-228 openvinotoolkit/openvino.genai#1676 X3,X4 Stop not removed
B-229 NVIDIA/TensorRT-LLM#18190 X5 400 for a valid request
B-230 antonellof/ferrox#124,waybarrios/vllm-mlx#109 X4 Replacement characters
B-231 ai-dynamo/dynamo#12630 X4 5 to 13 characters lost per reply
B-232 vllm-project/vllm#48853 X4 Prompt text leaks into first chunk
B-233 Blaizzy/mlx-vlm#1778,Blaizzy/mlx-vlm#1771 X4 Exception, or replacement characters
B-234 huggingface/tokenizers#1141 X4 Earlier bytes change later
B-235 vllm-project/vllm#16529,vllm-project/vllm#6866 X1,X2 One request kills the engine
B-236 vllm-project/vllm#54195,vllm-project/vllm#54196 X2,X12 Engine death on one backend, silent damage on others
B-237 CVE-2026-34756 X2 Out of memory before scheduling
B-238 NVIDIA/TensorRT-LLM#17158,NVIDIA/TensorRT-LLM#17159 X2 NaN accepted
B-239 NVIDIA/TensorRT-LLM#15715,NVIDIA/TensorRT-LLM#16222 X11 inf/NaN probabilities
B-240 vllm-project/vllm#22180 X11,X12 NaN row for greedy requests in mixed batches
B-241 RBLN-SW/vllm-rbln#615 X11,T4 Token id outside vocabulary
B-242 vllm-project/vllm#1595,vllm-project/vllm#2514 X7 Same seed, other text
B-243 vllm-project/vllm#51226 X7 Seed ignored if a neighbour has none
B-244 labscommunity/cascadia#20 X7 Second identical request differs
B-245 ROCm/ATOM#1562 X8 KV held until max_tokens
B-246 sgl-project/sglang#36475,sgl-project/sglang#36552 X8,S6 Session lost, scheduler killed by leak check
B-247 openvinotoolkit/model_server#4428 X8,A5,X1 Process dies seconds after a disconnect
B-248 vllm-project/vllm#9357,vllm-project/vllm#8625 X6 Wrong completion_tokens
B-249 vllm-project/vllm#47815,vllm-project/vllm#2703 X5 text_offset shifted; broken stream
B-250 vllm-project/vllm#5334,vllm-project/vllm#5846 X5,X4 Prompt tokens decoded with growing repeats
B-251 vllm-project/vllm#3707 X9 logprobs=0 gives none
B-252 vllm-project/vllm#16540 X4,X2 400 for high logprob counts
B-253 vllm-project/vllm#14399 X3 Empty answer
B-254 ggml-org/llama.cpp#23652 X1,S2 One long request aborts EVERY parallel generation
""".strip().splitlines()
    for fields in [line.split(" ", 3)]
}


def is_covered(bug: Bug) -> bool:
    """Whether a rule or a test covers an invariant that the bug broke."""
    return any(CORPUS[each].way is not Way.OUT for each in bug.invariants)
