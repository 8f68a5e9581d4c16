"""What each acceptance case means: what happens, and what this service promises for it.

Who calls it: `tests.support.cases`, which joins the lines with the tests that cite them. The faults
were reported by users of comparable systems (A to J) or found here (K).
What must stay true: one line per case, in the words of an operator or a sender.
"""

from __future__ import annotations

GROUPS = {
    "A": "Numbers and meaning",
    "B": "Texts, limits, truncation",
    "C": "Batches, memory, overload",
    "D": "Wire format",
    "E": "Kafka",
    "F": "Redis",
    "G": "Start, stop, health",
    "H": "Vector stores",
    "I": "Logs, metrics, traces",
    "J": "A stream of work",
    "K": "Found here, in use",
}

_TEXT = """
A01 | A decoder gives one text different vectors alone and in a batch. | The same vector in every position of every batch.
A02 | A one-word text comes back as NaN, at random. | Every value is finite; a thousand runs give one vector.
A03 | The model returns NaN for one item of five. | Four are answered; that item fails with its index and is counted.
A04 | NaN reaches the JSON encoder and costs the whole reply. | Only that item fails.
A05 | A mask constant overflows in half precision. | No NaN, even for a row that is all padding.
A06 | Batch composition changes the last digits. | The tolerance is stated and tested; fp32 on CPU gives the same bytes.
A07 | Sorting by length hands results to the wrong inputs. | Result i belongs to input i, duplicates included.
A08 | `dimensions` cuts a vector and does not renormalise it. | The cut vector has length one.
A09 | `dimensions` is 0, negative, too large, or asked of a model without it. | Refused with the allowed sizes, or computed; never ignored.
A10 | Pooling, Dense or Normalize modules of the folder are missed. | They are read from the folder; an unknown one stops the load.
A11 | A family computes something else than its reference. | Parity tests per family; an unsupported flag fails the load.
A12 | Half precision costs quality without a word. | The dtype is explicit and stands in every reply; float32 on CPU.
A13 | A prompt is added silently. | Prompts come from the request or the settings and are echoed.
A14 | The end token is missing, doubled or the wrong one. | Exactly the ids of the model's own tokenizer.
A15 | A language-model reranker is fed without its template. | The template is applied by the service; scores match the reference.
A16 | Scores are logits or probabilities, nobody knows which. | Both exist under their names, the default is stated, the order is the same.
A17 | A score depends on the other documents, or the activation runs twice. | A score is its document's alone; one activation, from the folder.
A18 | A two-label head answers a rerank request with a list. | Refused, or the label is chosen by a setting.
A19 | Cutting a pair leaves stale segment ids. | The score equals the reference on the same cut ids.
A20 | Pair truncation differs from the reference. | Documents are cut, queries never; `truncated` is told per document.
A21 | Different pairs get equal scores for want of digits. | Heads compute in float32.
A22 | A second, identical request meets a cache and gets another vector. | The same bytes again.
A23 | The tokenizer file's own padding or truncation is applied. | Both are reset at load; the model's limit counts.
A24 | A bad vector is cached and served again. | Errors and non-finite vectors never enter a cache.
B01 | `truncate` works for a string and not for a list of one. | The same vector both ways.
B02 | A hidden character limit refuses what tokens would allow. | Limits are settings, each with its own error code.
B03 | A too long text is refused with a message that helps nobody. | Code, limit, given, item index, and how to cut it.
B04 | Text is cut silently. | Refused or cut as asked, and `truncated` says so.
B05 | The limit is off by one. | The limit is accepted, one more is not.
B06 | A text of exactly the limit hangs. | Answered.
B07 | A too long request stays in the queue. | Answered at once; nothing occupies the queue.
B08 | Truncation is honoured on one entry and not on another. | One rule for every way in.
B09 | Position tables hold fewer tokens than the config says. | The usable limit is enforced before the forward.
B10 | An empty item fails its good neighbours. | It alone gets an error.
B11 | A text of blanks hangs. | Answered or refused, per item.
B12 | An empty last item shifts the results. | Always as many results as items.
B13 | A lone surrogate kills the batch. | One rule per item; the others are answered.
B14 | An empty list crashes or gets an odd status. | One defined answer for every task.
B15 | Several threads reconfigure one tokenizer. | One thread owns it; lengths are exact.
B16 | Truncation removes the end token. | It stays last.
B17 | Odd truncation lengths are taken or refused at random. | Values that leave no content are refused.
B18 | A text that spells a control token becomes one. | A sender's text is text, in documents too.
B19 | Token ids are taken for texts, or are out of range. | Ids are checked before the forward.
B20 | Chunks of padding are counted as tokens. | Tokens used are real tokens.
C01 | One exception ends the model's loop for good. | That batch fails, the next one works, health tells.
C02 | Batches are counted in items and exhaust memory. | A token budget bounds each batch.
C03 | The budget exceeds what fits. | Found at start or said clearly; effective limits are logged.
C04 | A batch that exhausts memory is retried for ever. | It is halved until the bad item is alone.
C05 | Memory grows with every request. | Flat after warm-up.
C06 | Loading takes twice the model's memory. | Load peak within 1.3 of the steady state.
C07 | Threads are oversubscribed. | Threads are set from the cores there are.
C08 | One long line exhausts the tokenizer. | Time and memory are bounded per megabyte.
C09 | More items than a batch holds are refused. | Split inside, one reply in order; the hard cap has its own code.
C10 | Overload treats one text and a list of one differently. | One rule; sources pause, nothing is dropped.
C11 | A dead thread or an early close hangs. | Bounded shutdown; a dead thread fails its work at once.
C12 | Items are tokenized one by one. | One batched call for many requests.
C13 | A senseless number in the settings panics later. | Refused at start by the setting's name.
C14 | One message at a time cannot be batched. | Waiting work is coalesced.
D01 | Vectors as base64 are read as something else. | Little-endian float32 in base64; unknown formats refused.
D02 | Clients pair results by position. | Every item carries its index, replies their count.
D03 | `top_n` is ignored or odd. | Sorted by score, ties by index, values checked.
D04 | Rerank results are taken to be in input order. | `index` is the input position; `sort` keeps the order on request.
D05 | Usage is absent or zero. | Tokens per item and in all, as computed.
D06 | An error does not say which item. | It carries the indexes.
D07 | Unknown options are accepted in silence. | Refused by their path.
D08 | Codecs are mixed up. | Named in a header; a mismatch is an error reply, never a crash; no pickle.
D09 | Half-precision output comes as float32. | `dtype` is honoured and named.
D10 | Normalised or not is anybody's guess. | Said in the reply; can be turned off.
D11 | A reply arrives for a request nobody remembers. | Ignored and counted.
E01 | A second member joins while work runs. | Only partitions still owned are committed, with explicit offsets.
E02 | A commit for a revoked partition kills the consumer. | Filtered; the consumer lives.
E03 | Compute delays the heartbeat and the member is thrown out. | Forwards never run on the event loop.
E04 | Back-pressure outlasts the poll interval. | Polling goes on with partitions paused.
E05 | A later record is committed before an earlier one. | The committed offset is the lowest unfinished one.
E06 | One stuck record fills all memory. | The window in flight is bounded per partition.
E07 | Hopeless records fill the window. | Attempts are capped, then a dead letter.
E08 | Unreadable commit metadata skips a record. | Reading resumes at the committed offset.
E09 | Offsets are committed although the reply never left. | No commit without a durable reply.
E10 | Offsets are committed before the broker has the output. | Reply first, commit second.
E11 | The broker is away for a minute while replies wait. | Every send is awaited and retried; nothing is lost.
E12 | A reply exceeds the broker's record limit. | Split into numbered parts, or an error with both sizes.
E13 | One undecodable record stops the pipeline. | A dead letter with bytes, origin and reason; the next one is processed.
E14 | A record without a value crashes the reader. | A tombstone is counted or deletes; an empty value is something else.
E15 | A topic is missing, or comes later. | Others flow; the new one is consumed without a restart.
E16 | A fenced or stale transaction ends the service. | Abort and redo when that helps, a clear end when it does not.
E17 | A consumer lives and receives nothing. | A watchdog connects anew or turns unready.
E18 | Commits overlap a rebalance and rewind. | Committed offsets never go back.
E19 | An offset that does not advance is one log line. | A gauge and a health reason.
F01 | The client's socket time-out is shorter than a blocking read. | No exception on an idle queue; dead connections are found.
F02 | Redis restarts empty. | Stream and group are made again at once, and counted.
F03 | A new group misses the backlog. | It starts at the beginning unless told otherwise.
F04 | A dead worker's entries stay pending. | Taken over within the idle limit.
F05 | Work longer than the idle limit runs twice. | The owner renews its lease while it lives.
F06 | Acknowledged entries fill the server. | Acknowledged means deleted.
F07 | Memory is full while replies are written. | The request waits and is answered when there is room; evicting policies are named at start.
F08 | A crashed worker blocks its job for hours. | Picked up within the claim time.
F09 | A client waits for a reply that has expired. | Its own deadline ends the wait.
F10 | An id is used twice. | A running twin is joined; a finished one is computed again; never silence.
F11 | Unread replies fill the server. | Every reply key expires.
F12 | A time to live of zero fails on one path only. | Checked at start, the same on all paths.
F13 | After a lost connection the worker takes nothing. | It goes on by itself; not ready meanwhile.
F14 | The server restarts during a wait. | Both sides recover; the reply is still there.
F15 | A popped job is lost with its worker. | It moves in one step and is reclaimed.
F16 | The server is too old. | Probed at start, refused clearly.
F17 | A blocking read returns late. | No deadline relies on it.
F18 | Names of dead consumers pile up. | Removed once nothing is pending for them.
F19 | A constant somewhere ends long retries. | All times to live are settings.
G01 | SIGTERM comes with work in flight. | Intake off, finish, publish, settle, exit 0; beyond the budget nothing is lost.
G02 | Closing never returns. | Bounded, whatever state the broker is in.
G03 | A draining member blocks its group. | It keeps polling; the rebalance completes.
G04 | Health says yes while the model is dead. | Readiness follows the model within seconds.
G05 | A busy service looks dead. | Progress counts as health.
G06 | The health port is slow under load. | It answers while both cores work.
G07 | Nothing answers during a long load. | The port opens first and names the phase.
G08 | No network at start. | A local folder loads without a connection attempt.
G09 | The broker advertises an address that cannot be reached. | The message names it; compose ships both listeners.
G10 | Callers have given up and the work goes on. | Expired and cancelled work is never computed.
G11 | `true`, `False`, `0`: booleans read differently by place. | One rule, and the error names the setting.
H01 | Ids of documents are refused or made at random. | Derived from the source's id; a second run changes nothing.
H02 | A bulk write exceeds the store's limit. | Batches are bounded by count and bytes.
H03 | The collection has another size. | Found at start; never retried.
H04 | One batch holds an id twice. | The last one wins.
H05 | A NUL byte aborts the whole load. | Cleaned or dead-lettered alone.
H06 | Part of a bulk write fails under status 200. | Status per item; only what may pass is retried.
H07 | Deletes are unclear. | Applied, in order per key.
H08 | A store hangs: written or not? | Retried under the same ids.
H09 | Zero vectors are used as filler. | Never written.
H10 | An upsert leaves part of the old record. | Vector, model and size change together.
I01 | A queue gauge does not move. | It rises and returns to zero.
I02 | No figures of waiting and batching. | A series for every station.
I03 | A broken metric breaks the work. | Logged once; the request is answered.
I04 | One span becomes the parent of thousands. | Each reply carries its own trace context.
I05 | Sender's text is found in logs. | In no line, label or trace.
I06 | A failed commit is logged without its place. | Topic, partition, offset.
I07 | Lag is computed from what was read, not done. | End minus committed, per owned partition.
I08 | Consumption has stopped and only a warning tells. | Error level, health reason, counter.
J01 | The device idles beside a slow source. | Stages overlap; idle time with work waiting is measured.
J02 | Queries on CPU and documents on GPU disagree. | fp32 and bf16 agree to 0.999; replies say which.
J03 | One record takes longer than the poll interval. | Polling goes on; it is committed once.
J04 | The drain at a rebalance is too short. | A setting, checked against the poll interval; the rest is released.
J05 | Two model versions answer one queue. | The fingerprint stands in every reply.
J06 | Scaling by messages misreads large ones. | Tokens waiting are the signal.
J07 | A folder's limit or pooling is ignored. | Read from the folder; equal to the library.
K01 | One compressed or damaged batch silences a partition. | All codecs work; what cannot be decoded costs itself only.
K02 | Requests of aborted transactions are answered. | Committed records only, by default.
K03 | Keys that are no text collide. | The same bytes come back; ids made from them are unique.
K04 | The server became a replica under a live connection. | It is left; not ready until writes work again.
K05 | `redis://host/3` is read as a stream. | It is database 3, as everywhere else.
K06 | A key of sentence_bert_config.json is ignored. | Honoured, or the folder is refused by the key's name.
K07 | Older names of that file are ignored. | All names that the library reads.
K08 | The folder's own prompt loses its special tokens. | Owner's text may hold them, a sender's may not.
K09 | Vectors change and the fingerprint does not. | Whatever changes a vector changes it, nothing else does.
K10 | A full disk leaves half a line in a file. | No torn line; what was not written is not settled.
K11 | Two limits disagree. | The reference's precedence, within what positions allow.
K12 | A partition added under `latest` loses its first records. | A partition that appears while we run is read from its start.
K13 | `+` or `/` in a password. | Kept as it is, or the message names the character to escape.
K14 | A Redis cluster is half served. | Served as a cluster, or refused at start.
K15 | A byte-order mark before JSON. | Skipped.
K16 | Writing `--out` replaces a pipe or narrows a mode. | Regular files keep their mode; all else is written through.
K17 | A missing key ends in a bare KeyError. | One line names file and key.
K18 | An embedder built on a chat model is fed plain text. | Its own message form, or refused by name.
K19 | Adapter files beside the weights are ignored. | Merged, or refused with the remedy.
K20 | A Unigram tokenizer turns text into control ids. | Probed at load with every special token.
K21 | A folder with its own model class runs as the plain one. | Refused without `trust_remote_code`.
K22 | A processing key of the tokenizer is ignored. | Honoured or refused by name.
K23 | Quantised weights without a config are cast. | Refused; the stored dtype is named.
K24 | A zero vector is called normalised. | The item fails as `zero_vector`.
K25 | Modules whose widths do not fit. | Refused at load with both numbers and files.
K26 | A decoder classifier is fed without its form. | The folder's form, or a note.
K27 | A refusal without a way out. | It says what the folder is and what to do.
K28 | More requests in flight than connections. | Any number; bounded by the pool.
K29 | Samples fail with the newest client library. | They carry their own time-outs and run in tests.
K30 | A sender puts a time to live on other people's keys. | A key that we did not make is never touched.
K31 | A field name of the sender is logged. | Withheld; the sender's reply names it.
K32 | An address with one slash prints its password. | Refused; nothing is printed before it parsed.
K33 | Ctrl-C while models load aborts. | The documented status, quickly, at any moment.
K34 | Printed code is wrapped and breaks when copied. | Printed raw; runs at any width.
K35 | `check` hides the problem behind a hundred lines. | Problems first, brokers before models.
K36 | A reranker answers a classify request. | A model answers only its folder's tasks.
K37 | An example ranks the wrong document first. | Examples run in tests that assert the order.
K38 | A damaged record's sender hears nothing. | The default destination is told.
K39 | Innocent requests are given up in a crash loop. | An attempt counts when its forward did not come back.
K40 | A library's error text quotes a record. | Type and code only.
K41 | Ready while nothing can be published. | Not ready, intake paused, nothing dead-lettered that waits for the operator.
K42 | Unknown reply topics hold up others. | Found once, cached, cost only their sender.
K43 | A user with few rights gets a KeyError. | The minimal rights are documented; each missing one is named.
K44 | SIGTERM in the first second has no status. | Handlers first, imports after.
K45 | A large reply takes its small neighbours along. | Each is sent alone before anybody is given up.
K46 | A record under another field name is lost on its sender. | Whoever can be told is told, with the expected form.
K47 | `check` takes half a minute for a wrong port. | Five seconds.
K48 | A rebalance repeats thousands of requests. | The window follows the rate; what was not begun is withdrawn.
K49 | `check` passes where `serve` fails. | It tries what `serve` needs.
K50 | Deleted entries vanish without a line; events flap. | Counted and logged once; events on change only.
K51 | Bits differ between calling threads. | Promised, and tested, where it holds.
K52 | An absolute bound fails on large values. | Bounds follow magnitude.
"""

LEGEND: dict[str, tuple[str, str]] = {
    case: (happens, promise)
    for case, happens, promise in (
        tuple(part.strip() for part in line.split("|")) for line in _TEXT.strip().splitlines()
    )
}
"""Case id -> (what happens, what is promised)."""
