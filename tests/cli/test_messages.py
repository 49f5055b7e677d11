"""What is typed, as in a shell, and the one line that it gets, with status 2 and before any work.

Three dots stand for any text, and a capital word for what `WORDS` says.
"""

import json
import re
import shlex

import jax
import pytest

import specjax
from specjax.checkpoints import save_draft_head
from specjax.cli.main import main
from specjax.evaluation import sandbox
from specjax.models import LlamaConfig
from specjax.models.heads import BlockConfig, draft_head
from specjax.processors import Regex
from specjax.tokenizers import ByteTokenizer
from specjax.tokenizers.tokenizer import Pieces
from tests import tiny_pair
from tests.cli.infer_command import CONFIGS

DATA = "--gin.TRAIN=train.txt --gin.VALIDATION=train.txt --gin.OUTPUT_DIR=out"
PAIR = "--gin.VERIFIER=pair/verifier --gin.DRAFTER=pair/drafter"
TASK = f"--gin.EXAMPLES=sums.jsonl --gin.OUTPUT_DIR=out {PAIR}"
WORDS = {
    "RUN": "--gin.INPUT=in.txt --gin.OUTPUT_DIR=out",
    "PAIR": PAIR,
    "HEADED": "--gin.VERIFIER=pair/verifier --gin.DRAFTER=head",
    # Fields of a table, of which a column of two is the targets.
    "PAIRS": "--gin.INPUT=pairs.tsv --gin.TARGETS_FIELD=1 --gin.OUTPUT_DIR=out",
    "SCORED": "--gin.PREDICTIONS=p.jsonl --gin.OUTPUT_DIR=out",
    "NETWORK": "--gin_file=models/t5_mini.gin --gin_file=tasks/fields.gin "
    "--gin.VALIDATION=in.tsv --gin.OUTPUT_DIR=out",
    "TINY": f"--gin_file=runs/train.gin --gin_file={CONFIGS.parent}/tests/cli/tiny_train.gin "
    "--gin.DATA_DIR=. --gin.OUTPUT_DIR=out",
    "HEAD": f"{DATA} {PAIR} --gin.BLOCKS=1 --gin.MAX_NEW_TOKENS=8",
    "SUMS": f"--gin_file=papers/faster_cascades/task_gemma_gsm8k.gin --gin.INPUT=sums.jsonl {TASK} "
    "--gin.SHOTS=2 --gin.LATENCY_LIMIT=6 --gin.LIMIT=None --gin.METRICS=\"('exact_match',)\"",
    "SHOTS": f"--gin_file=prompts/few_shot.gin --gin.INPUT=sums.jsonl {TASK} --gin.SHOTS=1 "
    "--gin.PROMPT='{question}' --gin.COMPLETION=' {answer}'",
}
TYPED = r"""
train_head
    unknown command; did you mean train head?
train-bigram x
    unknown command; did you mean train bigram?
train heads
    heads: unexpected argument; did you mean specjax train head?
infer --input=a.txt
    --input=a.txt: unknown option; did you mean --gin.INPUT=a.txt?
infer --max-draft
    --max-draft: unknown option; did you mean --gin.MAX_DRAFT?
infer --nonsense
    --nonsense: unknown option; see specjax infer --help
infer --gin.input=a
    --gin.input: no such name; did you mean INPUT?
infer a.txt
    ...unexpected argument; write --gin.INPUT=a.txt, or see specjax infer --help
infer prompts/gsm8k.gin
    prompts/gsm8k.gin: unexpected argument; write --gin_file=prompts/gsm8k.gin
infer --gin_file=prompts/gsm8.gin
    ...did you mean prompts/gsm8k.gin or tasks/gsm8k.gin?
infer --gin_file=/
    --gin_file=/: this is a directory: give the path of a file
infer --gin_file=few_shot
    ...did you mean prompts/few_shot.gin?
train --gin.SEED 1
    ...write --gin.SEED=1, or see specjax train --help
compare --estimate --full
    ...not allowed with argument --estimate; see specjax compare --help
bench
    the following arguments are required: --inputs; see specjax bench --help
demo --pair gsm8k
    --pair: unknown option; did you mean --built-in=gsm8k?
demo --pair=gsm8k
    --pair=gsm8k: unknown option; did you mean --built-in=gsm8k?
demo --max-drafts=3
    --max-drafts=3: unknown option; did you mean --max-draft=3?
demo --max-draft=0
    --max-draft must be a whole number of at least 1, got 0...
demo --output=in.txt
    ...in.txt is a file: give a new directory
demo --output=/dev/null/x
    .../dev/null/x...
inspect qwen3_06b
    qwen3_06b: no such directory or size; did you mean qwen3_0.6b?
inspect Qwen/Qwen3-0.6B
    Qwen/Qwen3-0.6B: no such directory or size; to download it from Hugging Face: hf download
    Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B; did you mean qwen3_0.6b?
inspect nowhere
    nowhere: no such directory; check the path, or download the model
convert Qwen/Qwen3-0.6B new --to=hf
    Qwen/Qwen3-0.6B: no such directory...hf download Qwen/Qwen3-0.6B...
inspect in.txt
    in.txt is a file; give a checkpoint's directory...
inspect a b c
    inspect takes one or two models, got 3...
inspect pair/drafter --memory 8
    --memory needs two models...
inspect pair/drafter pair/drafter --memory -1
    --memory must be above 0...
inspect pair/drafter pair/drafter --memory nan
    --memory must be above 0...
convert nowhere new --to=hf
    nowhere...
convert built-in:gsm8k/draft new --to=hf
    ...no such part of gsm8k: choose from bigram...
convert nowhere . --to=hf
    ...is not empty: give a new directory...
bench --inputs=/missing.txt
    /missing.txt...
bench --inputs=train.txt --verifier=pair/verifier --drafter=head --drafts 3 4
    --drafts must be at most 3 for this DFlash, whose block has 4 tokens, got 4
bench --inputs=train.txt --verifier=head --drafter=pair/drafter
    --verifier=head is a draft head: give the model it is for
bench --inputs=train.txt --verifier=nowhere
    --verifier='nowhere': no such file or directory...
bench --inputs=train.txt --verifier=pair/verifier
    --drafter must be given, too, because bench measures what its passes cost; specjax infer
    --gin.VERIFIER=pair/verifier --gin.DRAFTING="Lookup()" drafts without one
bench --inputs=in.txt --max-tokens=4
    --max-tokens=4: unknown option; did you mean --max-new=4?
bench --inputs=in.txt --num-speculative-tokens 4
    --num-speculative-tokens: unknown option; did you mean --drafts?
demo chat --model=x
    --model=x: unknown option; did you mean --verifier=x?
bench --inputs=pair
    pair is a directory: give a file of texts (.txt, .tsv or .jsonl)
train bigram pair --tokenizer=bytes --output=new
    pair is a directory: give a file of texts...
train bigram in.txt --tokenizer=Qwen/Qwen3-0.6B --output=new
    Qwen/Qwen3-0.6B: no such...hf download Qwen/Qwen3-0.6B...
bench --inputs=train.txt --verifier=pair/drafter --drafter=head
    head is a head for another verifier (pair/verifier), which has width 24, not 16...
infer RUN HEADED --gin.METHOD=DrafterAlone
    head is a draft head, which drafts only for its verifier...
infer RUN HEADED --gin.METHOD=TokenCascade --gin.RULE="Chow(0.3)"
    this DFlash head drafts only for its verifier, and cannot decode alone or in a cascade: ...
compare PAIRS HEADED --gin.METHODS="('TokenCascade(rule=Chow(0.3))',)"
    TokenCascade, Chow(0.3), T=1: this DFlash head drafts only for its verifier, and cannot...
compare PAIRS HEADED --gin.DRAFTING="('Tree(depth=2, width=2)',)"
    ...trees need a drafter that reads them, not BlockHead: draft chains, or give an EAGLE...
infer --gin_file=runs/infer.gin
    ...required but not given: INPUT, OUTPUT_DIR...
infer --gin.INPUT=nowhere.txt --gin.OUTPUT_DIR=out
    nowhere.txt: no such file...
infer RUN --gin.INPUT=
    INPUT is empty: give a path...
infer RUN --gin.OUTPUT_DIR=2024
    OUTPUT_DIR=2024 must be a path...
infer PAIR RUN --gin.INPUT=blank.txt
    blank.txt:1 is empty: add text, or leave it out...
infer RUN --gin.MAX_DRAFT=0
    MAX_DRAFT must be a whole number of at least 1, got 0...
infer RUN --gin.MIN_DRAFT=-1
    MIN_DRAFT must be...
infer RUN --gin.BATCH_SIZE=0
    BATCH_SIZE must be a whole number of at least 1, got 0...
infer RUN --gin.NUM_SAMPLES=0
    NUM_SAMPLES must be a whole number of at least 1, got 0...
infer PAIR RUN --gin.MAX_NEW_TOKENS=0
    MAX_NEW_TOKENS must be a whole number of at least 1, got 0...
infer PAIR RUN --gin.MAX_NEW_TOKENS=2147483647
    ...choose a smaller MAX_NEW_TOKENS=2147483647, BUCKETS=16 or MAX_DRAFT=5
infer PAIR RUN --gin.SEED=-1
    SEED must be a whole number in 0 .. 4294967295, got -1...
infer RUN --gin.TEMPERATURE=-1
    ...TEMPERATURE must be...
infer RUN --gin.TOP_P=2.0
    ...TOP_P must...
infer RUN --gin.TOP_K=0
    ...TOP_K must be...
infer RUN --gin.BUCKETS='(64, 32)'
    BUCKETS must be increasing lengths...
infer RUN --gin.STOP="('',)"
    ...has an empty text: leave it out...
infer RUN --gin.STOP=3
    ...must be texts such as...
infer RUN --gin.SOURCES=1
    SOURCES must be True or False, got 1...
infer RUN --show=-1
    --show must be a whole number of at least 0, got -1...
infer RUN --gin.infer.allow_other_environment=1
    ...must be True or False, got 1...
infer PAIR RUN --gin.CHAT=no
    CHAT must be True or False, or options of the chat template...
infer PAIR RUN --gin.CHAT=True
    in.txt:1: this tokenizer has no chat template...
infer RUN --gin.MESH_MODEL=16
    MESH_MODEL=16 needs 16 devices, but there are 8: choose smaller sizes
infer RUN --gin.STOPPING=Confidenc
    STOPPING='Confidenc': there is no such name; did you mean Confidence?
infer RUN --gin.STOPPING=Budget
    STOPPING='Budget': Budget: missing a required argument: 'tokens'
infer RUN --gin.RULE='Lossy(1.5)'
    RULE='Lossy(1.5)': strength must lie in [0, 1), got 1.5
infer RUN --gin.RULE='@Lossless()'
    ...parts of decoding are texts, such as RULE = 'OPT(0.2)'...
infer PAIR RUN --gin.Setting.rulez=1
    ...Setting has no parameter rulez; did you mean rule?
infer RUN --gin.NUM_SPECULATIVE_TOKENS=5
    --gin.NUM_SPECULATIVE_TOKENS: no such name; did you mean MAX_DRAFT?
infer RUN --gin.TASK=FewShot
    TASK must be like FewShot(prompt='Question: {question}'), got 'FewShot': write @FewShot()
infer --gin.VERIFIER=qwen3_0.6b --gin.DRAFTER=qwen3_0.6b RUN
    VERIFIER='qwen3_0.6b': no such file or directory: check the path; download models from a hub
    first
infer --gin.VERIFIER=Qwen/Qwen3-0.6B
    VERIFIER='Qwen/Qwen3-0.6B': no such file or directory: check the path; download models from a
    hub first; to download it from Hugging Face: hf download Qwen/Qwen3-0.6B --local-dir
    Qwen/Qwen3-0.6B
infer RUN --gin.VERIFIER=in.txt
    VERIFIER='in.txt' is a file: give the directory of a model, or a .gguf file
infer --gin.VERIFIER=pair/verifier --gin.DRAFTER=nowhere --gin.INPUT=/missing.txt
    DRAFTER='nowhere': no such file or directory...
infer RUN --gin.DRAFTER=pair/drafter
    DRAFTER is given without VERIFIER: give both, or neither for the built-in pair...
infer RUN --gin.VERIFIER=pair/verifier --gin.MAX_DRAFT=3
    MAX_DRAFT needs a drafter, and only VERIFIER is given: give DRAFTER, or leave out MAX_DRAFT;
    DRAFTING="Lookup()" drafts without a second model
infer RUN --gin.VERIFIER=pair/verifier --gin.RULE="OPT(0.2)"
    RULE needs a drafter, and only VERIFIER is given...
infer RUN PAIR --gin.INPUT=pair
    pair is a directory: give a file of texts (.txt, .tsv or .jsonl)
infer RUN PAIR --gin.OUTPUT_DIR=in.txt
    ...in.txt is a file: give a new directory
infer RUN PAIR --gin.COSTS=pair
    pair cannot be read (Is a directory): measure it...
infer RUN PAIR --gin.DRAFTER=other
    ...choose models of the same family, or load the pair with load_models.translate_drafter=True
infer RUN PAIR --gin.TOKENIZER=pair
    pair has no tokenizer...give its path, as a T5X directory needs it (TOKENIZER=PATH), or...
infer RUN PAIR --gin.MESH_MODEL=4
    the mesh's MESH_MODEL=4 does not divide...choose `MESH_MODEL` from 1, 2, or give each device a
    small drafter (REPLICATE_DRAFTER=True)
infer RUN --gin.max_tokens=3
    --gin.max_tokens: no such name; did you mean MAX_NEW_TOKENS?
infer --max-tokens=3
    --max-tokens=3: unknown option; did you mean --gin.MAX_NEW_TOKENS=3?
infer SHOTS --gin.TASK='@FewShots()'
    ...FewShots...
infer SHOTS --gin.PROMPT='{question'
    ...has an unpaired brace...
infer SHOTS --gin.PROMPT='solve it'
    ...='solve it' has no field, so all prompts would be equal...
infer SHOTS --gin.PROMPT='{questoin}'
    ...the record has 'question', 'answer'; write...
infer SHOTS --gin.COMPLETION="''"
    ...the template of an answer...
infer RUN --process_count 2
    give --process_count, --process_index and --coordinator_address, or...
infer RUN --process_count 2 --process_index 0
    give --process_count, --process_index and --coordinator_address, or...
infer RUN --coordinator_address a:1
    give --process_count, --process_index and --coordinator_address, or...
infer RUN --process_count 2 --process_index 2 --coordinator_address a:1
    --process_index must be below --process_count=2, got 2...
infer RUN --process_count 2 --process_index one
    --process_index (or SPECJAX_PROCESS_INDEX) must be a whole number...
infer RUN --distributed --process_count 2 --process_index 0 --coordinator_address a:1
    ...or only --distributed...
infer RUN --process_count 2 --process_index 0 --coordinator_address a
    ...must be HOST:PORT, the same for all...
compare RUN --gin.METHODS="('optt',)"
    METHODS='optt': there is no such name; did you mean OPT?
compare RUN --gin.METHODS="{'Lossyy(0.2)': None}"
    METHODS='Lossyy': there is no such name; did you mean Lossy?
compare RUN --gin.METHODS=opt,lossy
    METHODS must be a tuple of texts or a dict, got 'opt,lossy'; write ('opt', 'lossy')
compare PAIR PAIRS --gin.METHODS="{'Lossy({})': 1.5}"
    ...strength must lie in [0, 1), got...
compare RUN --gin.TEMPERATURES=0,1
    TEMPERATURES must be a tuple, got '0,1'; write (0, 1)
compare RUN --gin.MAX_DRAFTS=5
    MAX_DRAFTS must be a tuple, got 5; write (5,)
compare RUN --gin.METHOD=3
    --gin.METHOD: no such name; did you mean METHODS?
compare RUN --gin.DRAFTER=c
    DRAFTER='c': no such file or directory...
compare PAIRS --gin.VERIFIER=pair/verifier
    VERIFIER is given without DRAFTER: give both...
compare PAIR PAIRS --gin.DRAFTERS="('nowhere',)"
    ...nowhere...
compare PAIR PAIRS --full --gin.NUM_SAMPLES=0
    NUM_SAMPLES must be a whole number of at least 1, got 0...
compare PAIR PAIRS --gin.STOP="('',)"
    ...has an empty text...
compare PAIR PAIRS --gin.LIMIT=1
    ...1 texts are too few for an interval of the latency...
compare PAIR PAIRS --gin.TARGETS_FIELD=2
    ...there is no field '2': the record has '0', '1'...
compare PAIR PAIRS --gin.CHAT=1
    CHAT must be True or False, or options of the chat template...
compare PAIRS --gin.VERIFIER=nowhere --gin.DRAFTER=nowhere
    VERIFIER='nowhere': no such file...
compare PAIR PAIRS --gin.decoding.widths='(2, 4)'
    ...decoding has no parameter widths...
compare PAIR PAIRS --estimate --gin.MAX_LOSS=1
    limits need measurements...
compare PAIR PAIRS --gin.MAX_LOSS="'none'"
    MAX_LOSS must be...
compare PAIR PAIRS --gin.MEASURED=some
    MEASURED must be 'front', 'all' or 'none'...
compare SUMS --gin.PROMPT='{task}'
    ...there is no field 'task': the record has 'quest...
compare SUMS --gin.PROMPT='{question'
    ...has an unpaired brace or a field without a name...
compare SUMS --gin.TASK='@FewShots()'
    ...FewShots...
compare SUMS --gin.TASK=GSM8K --gin.REFERENCES=None
    TASK must...
compare SUMS --gin.REFERENCES=targets
    ...there is no field 'targets'...
compare SUMS --gin.METRICS="('accuracy',)"
    `METRICS` must be names in...
compare SUMS --gin.METRICS="('pass_at_1',)"
    ...give problems, and a sandbox...
compare SUMS --gin.PROBLEMS=sums.jsonl
    ...the line must have the keys of HumanEval...
compare SUMS --gin.SANDBOX='@Sandbox()'
    ...needs both problems (PROBLEMS=...
compare SUMS --gin.ANSWER=3
    ANSWER must be like AnswerAfter('####'), got 3...
compare SUMS --gin.TRUNCATE=left
    ...must be None, 'end' or 'beginning', got 'left'...
compare SUMS --gin.INPUTS_FIELD=question
    INPUTS_FIELD must be left out: the task names...
compare SUMS --gin.EXAMPLES=None
    SHOTS=2 needs...
evaluate --gin.PREDICTIONS=in.txt --gin.ANSWER=AnswerAfter
    ANSWER must be like AnswerAfter('####'), got 'AnswerAfter': write @AnswerAfter()
evaluate --gin.PREDICTIONS=r_opt,r_ver
    PREDICTIONS='r_opt,r_ver': no such file; write several as ('r_opt', 'r_ver')
evaluate SCORED --gin.REFERENCES=a,b
    REFERENCES='a,b': no such file; write several as ('a', 'b')
evaluate SCORED --gin.METRICS=bleu,chrf
    METRICS must be a tuple of names, got 'bleu,chrf'; write ('bleu', 'chrf')
evaluate --gin.PREDICTIONS=/missing.jsonl
    ...missing.jsonl: no such file...
evaluate --gin.PREDICTIONS=empty.jsonl
    empty.jsonl is empty...
evaluate --gin.PREDICTIONS=other.jsonl
    other.jsonl:1: 'prediction' must be a text or null; the line...
evaluate --gin.PREDICTIONS=number.jsonl
    ...'prediction' must be a text or null; the line has prediction=3...
evaluate --gin.PREDICTIONS=bare.jsonl
    there are 0 references for the 1 rows of bare.jsonl: give each...
evaluate --gin.PREDICTIONS=half.jsonl
    there are 1 references for the 2 rows of...
evaluate --gin.PREDICTIONS=dict.jsonl
    dict.jsonl: row 0 (from 0): 'targets' must be...
evaluate --gin.PREDICTIONS=sum.jsonl
    sum.jsonl:1: the line is not a row of this run, was changed, or is a duplicate: restore it, or
    remove `run` and `checksum` from all lines of a copy...
evaluate SCORED --gin.METRICS="('blue',)"
    `METRICS` must be names in bleu...
evaluate SCORED --gin.METRICS="'bleu'"
    ...write ('bleu',)
evaluate SCORED --gin.METRICS=3
    METRICS must be a tuple of names, got 3...
evaluate SCORED --gin.METRICS="('numeric_accuracy',)"
    ...example 0 (from 0) has invalid references...
evaluate SCORED --gin.REFERENCES=short.txt
    there are 1 references for the 2 rows of...
evaluate SCORED --gin.REFERENCES=pair
    pair is a directory: give a file of texts...
evaluate SCORED --gin.REFERENCES=/none.txt
    ...none.txt: no such file...
evaluate SCORED --gin.REFERENCES=3
    REFERENCES=3 must be a path: put a path of digits in quotes...
evaluate SCORED --gin.REFERENCES=short.txt --gin.REFERENCES_FIELD=de
    ...a line of a text file is one text, so there is no REFERENCES_FIELD='de': give a...
evaluate SCORED --gin.REFERENCES_FIELD=de
    REFERENCES_FIELD='de' needs references: give their f...
evaluate SCORED --gin.REFERENCES=other.jsonl
    other.jsonl:1: there is no field 'targets'...
evaluate SCORED --gin.REFERENCES=other.jsonl --gin.REFERENCES_FIELD=en
    ...there is no field 'en': the record has 'de'; give another field as REFERENCES_FIELD...
evaluate SCORED --gin.PREDICTIONS="('p.jsonl', 'long.jsonl')"
    ...p.jsonl differ in row 2: compare...
evaluate SCORED --gin.PREDICTIONS="('p.jsonl', 'else.jsonl')"
    ...differ in row 0...
evaluate SCORED --gin.PREDICTIONS='()'
    PREDICTIONS is empty...
evaluate SCORED --gin.PREDICTIONS="{'a': ()}"
    PREDICTIONS is empty...
evaluate SCORED --gin.PREDICTIONS="{'a': 3}"
    PREDICTIONS=3 must be a path...
evaluate SCORED --gin.PREDICTIONS=3
    PREDICTIONS=3 must be a path: put a path of digits in quotes...
evaluate SCORED --gin.COSTS=3
    COSTS must be a dict such as...
evaluate SCORED --gin.COSTS="{'verifier': 1}"
    ...has no counts of passes (`info`)...
evaluate SCORED --gin.RESAMPLES=3
    Bootstrap: RESAMPLES must be...
evaluate SCORED --gin.LEVEL=2.0
    Bootstrap: LEVEL must lie in (0, 1)...
train NETWORK --gin.TRAIN=one.tsv
    one.tsv:1: there is no field '1': the record has '0'; give another field as TARGETS_FIELD
train NETWORK --gin.TRAIN=in.txt
    in.txt: a line of a text file is one text, so there is no TARGETS_FIELD=1: give a .tsv or
    .jsonl file
train NETWORK --gin.TRAIN=in.tsv --gin.NUM_STEPS=0
    NUM_STEPS must be a whole number of at least 1, got 0...
train --gin.OUTPUT_DIR=out
    ...not given: train.training_data, train.validation_data; add...
train --gin.TRAIN=a
    ...no such name; add --gin_file=tasks/NAME.gin, NAME: fields, gsm8k, question_answer
train --gin_file=models/t5_mini.gin --gin.OUTPUT_DIR=a
    ...not given: train.training_data, train.validation_data; add --gin_file=tasks/NAME.gin, NAME:
    aligned_text, fields, multi30k_ende, question_answer
train TINY --gin.NUM_STEPS=1.5
    NUM_STEPS must be a whole number of at least 1, ...
train TINY --gin.NUM_STEPS=ten
    NUM_STEPS must be a number, got 'ten'...
train TINY --gin.NUM_STEPS='[1]'
    NUM_STEPS must be a single whole number, got [1]...
train TINY --gin.SEED=-1
    SEED must be a whole number of at least 0, ...
train TINY --gin.STEPS=3
    --gin.STEPS: no such name; did you mean NUM_STEPS?
train TINY --gin.LEARNING_RATE=fast
    AdamW: LEARNING_RATE must be a number, got 'fast'...
train TINY --gin.LEARNING_RATE=0
    AdamW: LEARNING_RATE must be finite and above 0, got 0...
train TINY --gin.TOKENS_PER_BATCH=x
    Batching: TOKENS_PER_BATCH must be a number, got 'x'...
train TINY --gin.Batching.bucket_lengths=24
    ...must be increasing lengths, such as (64, 128)...
train TINY --gin.Batching.bucket_lengths='(1,)'
    ...longer than 1 tokens...
train TINY --gin.TrainerConfig.num_devices=99
    ...`num_devices` must be at most 8...
train TINY --gin.T5Config.embed_dim=wide
    ...embed_dim='wide' must be a whole number...
train TINY --gin.T5Config.embed_dim=0
    ...embed_dim=0 must be at least 1...
train TINY --gin.T5Config.mlp_dim=1000000 --gin.T5Config.embed_dim=1000000
    ...with gradients and optimizer state: this needs at least...
train TINY --gin.OUTPUT_DIR=2024
    OUTPUT_DIR=2024 must be a path...
train TINY --gin.OUTPUT_DIR=in.txt/run
    ...in.txt/run cannot be written...
train TINY --gin.MODEL=None
    `MODEL` or `INIT_FROM` must be given; give a configuration...
train TINY --gin.INIT_FROM=/absent
    .../absent...
train TINY --gin.VOCABULARY=/absent
    .../absent: no such file...
train TINY --gin.VOCABULARY=bytes
    the vocabulary has 259 pieces, but the network's vocab_size=40...
train TINY --gin.Recipe.vocabulary_type=word
    ...vocabulary_type` must be one of unigram, bpe, got 'word'...
train TINY --gin.EXPORT_DTYPE=int8
    ...`EXPORT_DTYPE` must be one of float32, bfloat16, float16, got 'int8'...
train TINY --gin.validation/read_examples.targets_field=None
    validation data: example 0 must have...
train TINY --gin.test/read_examples.targets_field=None
    test data: example 0 must have a single ref...
train TINY --gin.training/read_examples.source=surrogate.jsonl \
--gin.training/read_examples.targets_field=targets
    training data: example 0 has half a surrogate pair...
train TINY --gin.read_examples.targets_field=2
    ...there is no field '2': the record has '0', '1'...
train TINY --gin.training/read_examples.source=empty.tsv
    ...empty.tsv is empty...
train TINY --gin.training/read_examples.source=latin1.tsv
    ...latin1.tsv:2: byte 0xfc at column 2...
train TINY --gin.training/read_examples.source=blank.tsv
    ...SentencePiece cannot train on this text...
train TINY --gin.training/read_examples.source=absent.tsv
    ...absent.tsv: no such file...
train TINY --gin.training/read_examples.source=seqio:x
    ...seqio...
train TINY --gin.TEACHER_SAMPLES=1
    Teacher: TEACHER=None and TEACHER_SAMPLES=1: give a teacher if and...
train TINY --gin.TEACHER_SAMPLES=-1
    Teacher: TEACHER_SAMPLES must be a whole number of at least 0, ...
train TINY --gin.TEACHER_SAMPLES='[1]'
    Teacher: TEACHER_SAMPLES must be a single whole number, got [1]...
train TINY --gin.DISTILLATION_WEIGHT=0.5
    Teacher: TEACHER=None and DISTILLATION_WEIGHT=0.5: give a teacher...
train TINY --gin.TEACHER=/absent
    Teacher: TEACHER=/absent and no use of it: give a teacher if and...one of
    `DISTILLATION_WEIGHT`... `TEACHER_SAMPLES`, `ON_POLICY...
train TINY --gin.ON_POLICY_SHARE=0.5
    Teacher: TEACHER=None and ON_POLICY_SHARE=0.5: give a teacher...
train TINY --gin.ON_POLICY_SHARE=1.5
    Teacher: ON_POLICY_SHARE must lie in [0, 1], got 1.5...
train TINY --gin.REFRESH_EVERY=0
    Teacher: REFRESH_EVERY must be a whole number of at least 1...
train TINY --gin.TEACHER=/absent --gin.ON_POLICY_SHARE=0.5 --gin.DISTILLATION_WEIGHT=0.5
    ...student would also learn its own texts; set DISTILLATION_WEIGHT to 1...
train TINY --gin.DIVERGENCE=kl
    Objective: DIVERGENCE must be one of forward_kl, reverse_kl, jsd...
train TINY --gin.ACCEPTED="('beam',)"
    Teacher: ACCEPTED must be among greedy, sampled, got 'beam'...
train TINY --gin.ACCEPTED=greedy
    Teacher: ACCEPTED must be a tuple of names, got 'greedy'...
train TINY --gin.ACCEPTED_DRAFT=0
    Teacher: ACCEPTED_DRAFT must be a whole number of at least 1...
train TINY --gin.CHOOSE_BY=accepted
    CHOOSE_BY='accepted' is not measured at checkpoints: choose...
train TINY --gin.CHOOSE_BY=bleu
    CHOOSE_BY='bleu' is not measured at checkpoints: choose one of...
train TINY --gin.CHOOSE_BY=accepted_greedy
    ...but teacher=None: give a teacher, or choose by another...
train drafter --gin.TRAIN=in.txt --gin.VERIFIER=pair/verifier --gin.OUTPUT_DIR=out
    ...not given: VALIDATION; add a gin file...
train drafter --gin.VERIFIER=pair/verifier --gin.TRAIN=in.txt --gin.VALIDATION=in.txt \
--gin.OUTPUT_DIR=out --gin.MAX_DRAFT=0
    ...MAX_DRAFT must be a whole number...
train head --gin.TRAIN=in.txt --gin.OUTPUT_DIR=out
    ...not given: VALIDATION; add a gin file...
train head HEAD --gin.REJECTION_WEIGHT=0
    HeadRecipe: REJECTION_WEIGHT must be finite and above 0, got 0...
train head HEAD --gin.MIXING=1.5
    Labelling: MIXING must lie in [0, 1), got 1.5...
train head HEAD --gin.MIXING=-0.1
    Labelling: MIXING must lie in [0, 1), got -0.1...
train head HEAD --gin.TEMPERATURE=-1
    Labelling: TEMPERATURE must be finite and at least 0, got -1...
train head HEAD --gin.MAX_NEW_TOKENS=0
    Labelling: MAX_NEW_TOKENS must be a whole number of at least 1, got 0...
train head HEAD --gin.BLOCKS=5
    HeadConfig: BLOCKS must be a whole number in [0, 4], got 5...
train head HEAD --gin.EPOCHS=0
    HeadRecipe: EPOCHS must be a whole number of at least 1, got 0...
train head HEAD --gin.LEARNING_RATE=0
    AdamW: LEARNING_RATE must be finite and above 0, got 0...
train head HEAD --gin.SHARED=1
    HeadConfig: SHARED must be True or False, got 1...
train head HEAD --gin.INSTALL=1
    INSTALL must be True, False or 'anyway', got 1...
train head HEAD --gin.CHAT=1
    Labelling: CHAT must be True or False, or options of the chat template...
train head HEAD --gin.TRAIN=empty.txt
    empty.txt is empty: it must have at least one line...
train head HEAD --gin.TRAIN=blank.txt
    training data: no prompt can be decoded; the first error: training example 0 is...
train head --gin.TRAIN=train.txt --gin.VALIDATION=train.txt --gin.OUTPUT_DIR=out \
--gin.INSTALL=True --gin.VERIFIER=built-in:multi30k_ende/verifier \
--gin.DRAFTER=built-in:multi30k_ende/drafter
    ...is the built-in drafter, which is part of specjax: give a copy...
train head HEAD --gin.DRAFTER=/absent
    DRAFTER='/absent': no such file or directory...
train head HEAD --gin.DRAFTER=other
    ...have different tokenizers...
train bigram absent.txt --tokenizer=bytes --output=new
    absent.txt: no such file: check...
train bigram in.txt --tokenizer=absent --output=new
    absent: no such file or directory; give a model's directory...
train bigram in.txt --tokenizer=bytes --output=new --field=x
    ...so there is no --field='x': give a .tsv or .jsonl file
train bigram in.txt --tokenizer=bytes --output=new --format=tsv --field=4
    ...there is no field '4': the record has '0'...
train bigram in.txt --tokenizer=bytes --output=.
    ...is not empty: give a new directory...
train bigram in.txt --tokenizer=bytes --output=new --min-count=0
    --min-count must be a whole number of at least 1, got 0...
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = [{"prediction": "a", "targets": "a", "inputs": "x"}, {"prediction": "b", "targets": "b"}]
    sums = [{"question": f"{i} and {i}?", "answer": f"#### {2 * i}"} for i in range(10)]
    records = {
        "p": good,
        "long": [*good, good[1]],
        "else": [{**good[0], "inputs": "y"}, good[1]],
        "half": [good[0], {"prediction": "b"}],
        "other": [{"de": "a"}, {"de": "b"}],
        "number": [{"prediction": 3}],
        "bare": [{"prediction": "a"}],
        "dict": [{"prediction": "a", "targets": {}}],
        "sum": [{"prediction": "a", "checksum": "0"}],
        "empty": [],
        "sums": sums,
        "surrogate": [{"inputs": "a\ud800", "targets": "b"}],
    }
    for name, rows in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = tiny_pair.sentences(8, seed=1)
    pairs = "".join(f"{text}\t{text}\n" for text in texts)
    for name, text in {
        "in.txt": "Ein Hund rennt.\n",
        "in.tsv": "A dog runs.\tEin Hund rennt.\n",
        "one.tsv": "A dog runs.\n",
        "short.txt": "a\n",
        **dict.fromkeys(("empty.txt", "empty.tsv"), ""),
        "blank.txt": "\n \n",
        "blank.tsv": "\t\n\t\n",
        "latin1.tsv": "a\tb\nfüße\tb\n",
        "train.txt": "".join(f"{text}\n" for text in texts),
        **dict.fromkeys(("pairs.tsv", "train.tsv", "validation.tsv"), pairs),
    }.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    (tmp_path / "pair").symlink_to(tiny_pair.shared_pair()["verifier"].parent)


def write_block_head(place):
    """Writes a DFlash of the pair's verifier, for three drafts."""
    verifier = specjax.load_text_model(place / "pair/verifier")
    sizes = LlamaConfig(
        vocab_size=tiny_pair.VOCAB,
        embed_dim=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=8,
        num_layers=1,
    )
    config = BlockConfig(
        layers=sizes, boundaries=(0, 1), windows=(None,), block_size=4, mask_token=1
    )
    head = draft_head(config, verifier.model)
    params = {"verifier_params": verifier.params, "verifier_name": "pair/verifier"}
    save_draft_head(place / "head", head, head.init(jax.random.key(0)), **params)


CASES = re.findall(r"^(\S(?:.*\\\n)*.*)\n((?: +.*\n)+)", TYPED, re.M)


@pytest.mark.parametrize(("typed", "told"), CASES, ids=lambda text: text.strip()[:70])
def test_what_is_typed_gets_one_line(tmp_path, capsys, typed, told):
    if "@Sandbox" in typed and sandbox.missing() is not None:
        pytest.skip("no sandbox here")
    if "DRAFTER=other" in typed:
        tiny_pair.write_vocabulary(tiny_pair.write_model(tmp_path / "other", "drafter"), "stwx")
    words = []
    for word in shlex.split(typed.replace("\\\n", " ")):
        words += shlex.split(WORDS[word]) if word in WORDS else [word]
    if any(word.endswith("=head") for word in words):
        write_block_head(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    shown = capsys.readouterr()
    *notes, line = shown.err.splitlines()
    assert all(note.startswith("specjax: ") for note in notes)
    command = re.match("train (drafter|head|bigram)\\b|demo chat\\b|[^ ]+", typed)[0]
    pattern = ".*".join(map(re.escape, " ".join(told.split()).split("...")))
    assert re.fullmatch(f"specjax {command}: {pattern}", line), line
    assert shown.out == "" and sorted(tmp_path.rglob("*")) == before


def test_the_data_are_read_before_a_model(capsys, monkeypatch):
    monkeypatch.delattr("specjax.training.recipe.load_model")
    typed = (
        f"train {WORDS['NETWORK']} --gin.TRAIN=absent.tsv --gin.INIT_FROM=built-in:gsm8k/drafter"
    )
    assert main(shlex.split(typed)) == 2
    assert "absent.tsv: no such file: check the path\n" in capsys.readouterr().err


class Letters(ByteTokenizer):
    """Writes small letters only."""

    def pieces(self):
        texts = [b"" if not text.islower() else text for text in super().pieces().later]
        return Pieces(texts, texts)


def test_what_is_called_gets_one_line():
    drafter, verifier = (tiny_pair.tabular(i, Letters()) for i in (1, 2))
    with pytest.raises(ValueError) as error:
        specjax.Decoder(
            specjax.text.Pair(drafter=drafter, verifier=verifier),
            processors=(Regex("[0-9]"),),
            max_new_tokens=4,
        )(["a"])
    assert str(error.value) == (
        "Regex('[0-9]'): the tokenizer's tokens can write no text that matches: check the "
        "pattern or schema, and that its characters are in the vocabulary"
    )
