package storetest

import (
	"context"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

func TestSoundStorePasses(t *testing.T) {
	t.Parallel()
	Run(t, func(*testing.T) *Harness { return newMemoryStore().harness() })
}

// brokenStores have one fault each.
var brokenStores = []struct {
	fault string
	plant func(*faults)
	check string // the one that names the fault
	also  string // the other ones that it cannot but fail
}{
	{"runs duplicates", func(f *faults) { f.runsDuplicates = true }, "ClaimsOnce", "" +
		"EffectsComeWithTheClaim RollbackIsIdempotent ConcurrentClaimsRunOnce WaiterSkipsAfterCommit " +
		"WaitIsBounded WaitLeavesTheSessionAlone KeysAreExact KeysOfAnyBytes CancelledInTheHandler " +
		"CancelledAnywhere TransactionOutlivesBegin RecordTellsTimes FingerprintIsKept OutputsAreKept " +
		"OutputsGoWithTheirRecord OutputsAreMarked DeletesByAge DeletesInBatches DeletesNoUnpublishedOutputs DeletesBesideClaims " +
		"ForgetsKeys StoresShareClaims CreatesItsSchema LeavesNoConnection LeavesNoGoroutine"},
	{"shows effects before the commit", func(f *faults) { f.shows = true }, "EffectsComeWithTheClaim", "" +
		"RollbackReleasesClaim RollbackWithEndedContext LostConnectionReleasesClaim CommitProvesTheClaim " +
		"CancelledInTheHandler CancelledAnywhere CommitWithEndedContext"},
	{"keeps effects after a rollback", func(f *faults) { f.keepsEffects = true }, "RollbackReleasesClaim", "" +
		"RollbackWithEndedContext CancelledInTheHandler CancelledAnywhere CommitWithEndedContext"},
	{"keeps claims after a rollback", func(f *faults) { f.keepsClaims = true }, "RollbackReleasesClaim", "" +
		"RollbackWithEndedContext RollbackIsIdempotent LostConnectionReleasesClaim CommitProvesTheClaim " +
		"WaiterRunsAfterRollback CancelledBeforeBegin CancelledWhileWaiting CancelledInTheHandler " +
		"CancelledAnywhere CommitWithEndedContext DeletesByAge DeletesInBatches DeletesNoUnpublishedOutputs " +
		"LeavesNoConnection LeavesNoGoroutine"},
	{"forgets rollbacks that come late", func(f *faults) { f.keepsLateRollbacks = true }, "RollbackWithEndedContext", ""},
	{"fails the second rollback", func(f *faults) { f.failsTwice = true }, "RollbackIsIdempotent", "" +
		"RollbackWithEndedContext LostConnectionReleasesClaim CommitProvesTheClaim ConcurrentClaimsRunOnce " +
		"WaitIsBounded WaitLeavesTheSessionAlone CancelledInTheHandler CancelledAnywhere " +
		"CommitWithEndedContext NativeIsDeadAfterwards OutputsGoWithTheirRecord DeletesBesideClaims " +
		"LeavesNoConnection LeavesNoGoroutine"},
	{"undoes commits", func(f *faults) { f.undoesCommits = true }, "RollbackIsIdempotent", "" +
		"ConcurrentClaimsRunOnce WaitIsBounded WaitLeavesTheSessionAlone CancelledInTheHandler " +
		"CancelledAnywhere DeletesBesideClaims LeavesNoConnection LeavesNoGoroutine"},
	{"takes a killed connection for a commit", func(f *faults) { f.commitsKilled = true }, "LostConnectionReleasesClaim", ""},
	{"keeps claims of killed connections", func(f *faults) { f.keepsKilled = true }, "LostConnectionReleasesClaim", ""},
	{"never calls a connection lost", func(f *faults) { f.neverLost = true }, "LostConnectionReleasesClaim", ""},
	{"calls every connection lost", func(f *faults) { f.alwaysLost = true }, "LostConnectionReleasesClaim", ""},
	{"commits what was undone", func(f *faults) { f.commitsUndone = true }, "CommitProvesTheClaim", ""},
	{"checks, then inserts", func(f *faults) { f.checksFirst = true }, "ConcurrentClaimsRunOnce", "" +
		"WaiterSkipsAfterCommit WaiterRunsAfterRollback WaiterHoldsUpNoOtherKey WaitIsBounded " +
		"CancelledWhileWaiting DeletesBesideClaims StoresShareClaims LeavesNoConnection LeavesNoGoroutine"},
	{"gives up at once", func(f *faults) {
		f.begins = func(ctx context.Context, claim *inbox.Claim) context.Context { claim.LockTimeout = 0; return ctx }
	}, "WaiterSkipsAfterCommit", "" +
		"WaiterRunsAfterRollback WaiterHoldsUpNoOtherKey CancelledWhileWaiting LeavesNoConnection " +
		"LeavesNoGoroutine"},
	{"takes all it waits for as committed", func(f *faults) { f.assumesCommits = true }, "WaiterRunsAfterRollback", ""},
	{"holds up other keys", func(f *faults) { f.holdsUpOthers = true }, "WaiterHoldsUpNoOtherKey", ""},
	{"waits for ever", func(f *faults) { f.waitsForever = true }, "WaitIsBounded", "" +
		"DeletesBesideClaims StoresShareClaims LeavesNoConnection LeavesNoGoroutine"},
	{"leaves its lock timeout to the handler", func(f *faults) { f.meddles = true }, "WaitLeavesTheSessionAlone", ""},
	{"folds case", func(f *faults) { f.key = eachKey(strings.ToLower) }, "KeysAreExact", "ConsumersAreIndependent OutputsAreMarked"},
	{"trims blanks", func(f *faults) { f.key = eachKey(strings.TrimSpace) }, "KeysAreExact", "ConsumersAreIndependent"},
	{"folds accents", func(f *faults) { f.key = eachKey(strings.NewReplacer("ä", "a", "\u0308", "").Replace) }, "KeysAreExact", ""},
	{"composes", func(f *faults) { f.key = eachKey(strings.NewReplacer("a\u0308", "ä").Replace) }, "KeysAreExact", ""},
	{"reads numbers", func(f *faults) { f.key = eachKey(number) }, "KeysAreExact", ""},
	{"truncates", func(f *faults) { f.key = eachKey(func(part string) string { return part[:min(len(part), 254)] }) }, "KeysAreExact", ""},
	{"cuts hashes off", func(f *faults) {
		f.key = eachKey(func(part string) string {
			if strings.HasPrefix(part, "sha256:") {
				return part[:len("sha256:")+1]
			}
			return part
		})
	}, "KeysOfAnyBytes", "ForgetsKeys"},
	{"ignores consumers", func(f *faults) {
		f.key = func(key inbox.Key) inbox.Key { return inbox.Key{MessageID: key.MessageID} }
	}, "ConsumersAreIndependent", "" +
		"KeysOfAnyBytes OutputsGoWithTheirRecord OutputsAreMarked DeletesNoUnpublishedOutputs ForgetsKeys"},
	{"joins consumer and ID", func(f *faults) {
		f.key = func(key inbox.Key) inbox.Key { return inbox.Key{MessageID: key.Consumer + key.MessageID} }
	}, "ConsumersAreIndependent", "" +
		"OutputsGoWithTheirRecord OutputsAreMarked DeletesNoUnpublishedOutputs ForgetsKeys"},
	{"begins for nobody", func(f *faults) {
		f.begins = func(ctx context.Context, _ *inbox.Claim) context.Context { return context.WithoutCancel(ctx) }
	}, "CancelledBeforeBegin", "CancelledWhileWaiting LeavesNoConnection LeavesNoGoroutine"},
	{"does not stop waiting", func(f *faults) {
		f.begins = func(ctx context.Context, _ *inbox.Claim) context.Context {
			if ctx.Err() == nil {
				return context.WithoutCancel(ctx)
			}
			return ctx
		}
	}, "CancelledWhileWaiting", "LeavesNoConnection LeavesNoGoroutine"},
	{"hides that the context ended", func(f *faults) { f.hidesEnds = true }, "CancelledWhileWaiting", "LeavesNoConnection LeavesNoGoroutine"},
	{"commits what is left after an interrupted statement", func(f *faults) { f.interrupts = true }, "CancelledInTheHandler", ""},
	{"tears commits that are interrupted", func(f *faults) { f.tearsCommits = true }, "CancelledAnywhere", ""},
	{"ties transactions to Begin", func(f *faults) { f.tied = true }, "TransactionOutlivesBegin", ""},
	{"commits the claim alone", func(f *faults) { f.commitsHalf = true }, "CommitWithEndedContext", "CancelledAnywhere"},
	{"lets natives live on", func(f *faults) { f.zombies = true }, "NativeIsDeadAfterwards", ""},
	{"shifts times", func(f *faults) {
		f.shown = func(r *inbox.Record, _ inbox.Claim) {
			r.ReceivedAt, r.ProcessedAt = r.ReceivedAt.Add(time.Hour), r.ProcessedAt.Add(time.Hour)
		}
	}, "RecordTellsTimes", ""},
	{"mixes up times", func(f *faults) {
		f.shown = func(r *inbox.Record, _ inbox.Claim) { r.ReceivedAt, r.ProcessedAt = r.ProcessedAt, r.ReceivedAt }
	}, "RecordTellsTimes", ""},
	{"tells no times", func(f *faults) {
		f.shown = func(r *inbox.Record, _ inbox.Claim) { r.ProcessedAt = time.Time{} }
	}, "RecordTellsTimes", ""},
	{"loses fingerprints", func(f *faults) {
		f.shown = func(r *inbox.Record, _ inbox.Claim) { r.Fingerprint = nil }
	}, "FingerprintIsKept", ""},
	{"takes no fingerprint for an empty one", func(f *faults) {
		f.shown = func(r *inbox.Record, _ inbox.Claim) { r.Fingerprint = append([]byte{}, r.Fingerprint...) }
	}, "FingerprintIsKept", ""},
	{"takes duplicates' fingerprints", func(f *faults) {
		f.shown = func(r *inbox.Record, claim inbox.Claim) { r.Fingerprint = claim.Fingerprint }
	}, "FingerprintIsKept", ""},
	{"refuses payloads", func(f *faults) {
		f.stored = func(claim inbox.Claim) error {
			if claim.Message != nil && slices.Contains(claim.Message.Payload, 0xff) {
				return errors.New("commit: invalid byte sequence")
			}
			return nil
		}
	}, "AnyPayloadIsStored", ""},
	{"refuses messages without metadata", func(f *faults) {
		f.stored = func(claim inbox.Claim) error {
			if claim.Message != nil {
				claim.Message.Metadata.Set("stored", "true") // panics
			}
			return nil
		}
	}, "AnyPayloadIsStored", ""},
	{"loses outputs", func(f *faults) {
		f.outputs = func([]*message.Message) []*message.Message { return nil }
	}, "OutputsAreKept", "" +
		"OutputsAreMarked DeletesNoUnpublishedOutputs ForgetsKeys StoresShareClaims"},
	{"loses all outputs but one", func(f *faults) {
		f.outputs = func(msgs []*message.Message) []*message.Message { return msgs[:min(len(msgs), 1)] }
	}, "OutputsAreKept", ""},
	{"loses their order", func(f *faults) {
		f.outputs = func(msgs []*message.Message) []*message.Message { slices.Reverse(msgs); return msgs }
	}, "OutputsAreKept", ""},
	{"sorts outputs", func(f *faults) {
		f.outputs = func(msgs []*message.Message) []*message.Message {
			slices.SortFunc(msgs, func(a, b *message.Message) int { return strings.Compare(a.UUID, b.UUID) })
			return msgs
		}
	}, "OutputsAreKept", ""},
	{"loses metadata", func(f *faults) {
		f.outputs = eachOutput(func(msg *message.Message) { clear(msg.Metadata) })
	}, "OutputsAreKept", ""},
	{"loses empty metadata", func(f *faults) {
		f.outputs = eachOutput(func(msg *message.Message) { delete(msg.Metadata, "name") })
	}, "OutputsAreKept", ""},
	{"has outputs without metadata", func(f *faults) {
		f.shown = func(r *inbox.Record, _ inbox.Claim) {
			r.Outputs = eachOutput(func(msg *message.Message) { msg.Metadata = nil })(r.Outputs)
		}
	}, "OutputsAreKept", ""},
	{"changes bytes", func(f *faults) {
		f.outputs = eachOutput(func(msg *message.Message) { msg.Payload = []byte(strings.ToValidUTF8(string(msg.Payload), "?")) })
	}, "OutputsAreKept", ""},
	{"cuts payloads off", func(f *faults) {
		f.outputs = eachOutput(func(msg *message.Message) { msg.Payload = msg.Payload[:min(len(msg.Payload), 1<<16-1)] })
	}, "OutputsAreKept", ""},
	{"changes UUIDs", func(f *faults) {
		f.outputs = eachOutput(func(msg *message.Message) { msg.UUID = strings.ToLower(msg.UUID) })
	}, "OutputsAreKept", ""},
	{"keeps messages that are others'", func(f *faults) { f.aliases = true }, "OutputsAreKept", ""},
	{"keeps outputs of commits that fail", func(f *faults) { f.keepsFailedOutputs = true }, "OutputsGoWithTheirRecord", ""},
	{"keeps outputs of what is forgotten", func(f *faults) { f.keepsOutputs = true }, "OutputsGoWithTheirRecord", ""},
	{"marks everything", func(f *faults) {
		f.marks = func([]inbox.Key, inbox.Key) bool { return true }
	}, "OutputsAreMarked", ""},
	{"marks nothing", func(f *faults) {
		f.marks = func([]inbox.Key, inbox.Key) bool { return false }
	}, "OutputsAreMarked", "DeletesNoUnpublishedOutputs"},
	{"marks the first batch only", func(f *faults) {
		f.marks = func(marked []inbox.Key, key inbox.Key) bool {
			sorted := slices.SortedFunc(slices.Values(marked), func(a, b inbox.Key) int {
				return strings.Compare(a.MessageID, b.MessageID)
			})
			return slices.Contains(sorted[:min(len(sorted), 200)], key)
		}
	}, "OutputsAreMarked", ""},
	{"marks other consumers' outputs", func(f *faults) {
		f.marks = func(marked []inbox.Key, key inbox.Key) bool {
			return slices.ContainsFunc(marked, func(m inbox.Key) bool { return m.MessageID == key.MessageID })
		}
	}, "OutputsAreMarked", ""},
	{"deletes young records", func(f *faults) {
		f.age = func(*memoryRow) time.Duration { return time.Hour }
	}, "DeletesByAge", ""},
	{"counts the age from the claim", func(f *faults) {
		f.age = func(row *memoryRow) time.Duration { return time.Since(row.record.ReceivedAt) }
	}, "DeletesByAge", ""},
	{"deletes nothing", func(f *faults) {
		f.batch = func(int, int) (int, int) { return 0, 0 }
	}, "DeletesByAge", "DeletesInBatches DeletesNoUnpublishedOutputs"},
	{"knows no limit", func(f *faults) {
		f.batch = func(_, deleted int) (int, int) { return -1, deleted }
	}, "DeletesInBatches", ""},
	{"counts one too many", func(f *faults) {
		f.batch = func(limit, deleted int) (int, int) { return limit - 1, deleted + 1 }
	}, "DeletesInBatches", ""},
	{"counts one too few", func(f *faults) {
		f.batch = func(limit, deleted int) (int, int) { return limit, max(deleted-1, 0) }
	}, "DeletesInBatches", ""},
	{"deletes unpublished outputs", func(f *faults) { f.deletesPending = true }, "DeletesNoUnpublishedOutputs", ""},
	{"deletes open claims", func(f *faults) { f.deletesHeld = true }, "DeletesBesideClaims", ""},
	{"waits with deletions for claims", func(f *faults) { f.deletesAfterClaims = true }, "DeletesBesideClaims", ""},
	{"forgets nothing", func(f *faults) {
		f.forgets = func(inbox.Key, inbox.Key) bool { return false }
	}, "ForgetsKeys", "OutputsGoWithTheirRecord"},
	{"forgets everything", func(f *faults) {
		f.forgets = func(inbox.Key, inbox.Key) bool { return true }
	}, "ForgetsKeys", ""},
	{"forgets no key that is stored as its hash", func(f *faults) {
		f.forgets = func(forgotten, key inbox.Key) bool { return forgotten == key }
	}, "ForgetsKeys", ""},
	{"shares no claims", func(f *faults) { f.alone = true }, "StoresShareClaims", "ConcurrentClaimsRunOnce"},
	{"has one table for all", func(f *faults) { f.mixesTables = true }, "TablesAreIndependent", ""},
	{"creates its schema for one", func(f *faults) { f.createsOnce = true }, "CreatesItsSchema", ""},
	{"creates its schema anew", func(f *faults) { f.createsAnew = true }, "CreatesItsSchema", ""},
	{"calls every error transient", func(f *faults) {
		f.mood = func(err error) bool { return err != nil }
	}, "ClassifiesErrors", "ClassifiesWrappedErrors"},
	{"calls no error transient", func(f *faults) {
		f.mood = func(err error) bool { return err == nil }
	}, "ClassifiesErrors", "ClassifiesWrappedErrors"},
	{"looks into no error", func(f *faults) {
		f.mood = func(err error) bool { return err == errMemoryConflict } //nolint:errorlint // the fault
	}, "ClassifiesWrappedErrors", ""},
	{"takes what is in flight for transient", func(f *faults) {
		f.mood = func(err error) bool { return errors.Is(err, errMemoryConflict) }
	}, "ClassifiesWrappedErrors", ""},
	{"leaks connections", func(f *faults) { f.leaksConnections = true }, "LeavesNoConnection", ""},
	{"leaks goroutines", func(f *faults) { f.leaksGoroutines = make(chan struct{}) }, "LeavesNoGoroutine", ""},
}

// number is how a numeric column reads a key.
func number(part string) string {
	if f, err := strconv.ParseFloat(part, 64); err == nil {
		return fmt.Sprint(f)
	}
	return part
}

func eachKey(change func(string) string) func(inbox.Key) inbox.Key {
	return func(key inbox.Key) inbox.Key {
		return inbox.Key{Consumer: change(key.Consumer), MessageID: change(key.MessageID)}
	}
}

func eachOutput(change func(*message.Message)) func([]*message.Message) []*message.Message {
	return func(msgs []*message.Message) []*message.Message {
		for _, msg := range msgs {
			change(msg)
		}
		return msgs
	}
}

// TestBrokenStoresFail runs all checks on each of them. In a bubble: what hangs is found at once, and a slow machine makes
// no difference.
func TestBrokenStoresFail(t *testing.T) {
	t.Parallel()
	for _, tt := range brokenStores {
		t.Run(tt.fault, func(t *testing.T) {
			t.Parallel()
			want := append(strings.Fields(tt.also), tt.check)
			for _, c := range checks {
				var err error
				synctest.Test(t, func(t *testing.T) {
					store := newMemoryStore()
					store.db.latency = time.Millisecond
					tt.plant(&store.faults)
					err = c.against(t.Context(), store.harness())
					if store.leaksGoroutines != nil {
						close(store.leaksGoroutines)
					}
					time.Sleep(timeout) // for what still waits
				})
				switch {
				case errors.Is(err, errSkip):
					t.Errorf("%s: %v", c.name, err)
				case err != nil && !slices.Contains(want, c.name):
					t.Errorf("%s fails as well: %v", c.name, err)
				case err == nil && slices.Contains(want, c.name):
					t.Errorf("%s does not fail", c.name)
				case err != nil:
					t.Logf("%s: %v", c.name, err)
				}
			}
		})
	}
}

func TestEveryCheckHasItsFault(t *testing.T) {
	t.Parallel()
	for _, c := range checks {
		named := false
		for _, tt := range brokenStores {
			named = named || tt.check == c.name
		}
		if !named {
			t.Errorf("no broken store is there for %s", c.name)
		}
	}
}

// TestPackageCommentNumbersTheChecks compares it with what Run runs.
func TestPackageCommentNumbersTheChecks(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "storetest.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for i, c := range checks {
		want = append(want, fmt.Sprintf("%d. %s", i+1, c.name))
	}
	for _, point := range regexp.MustCompile(`(?m)^ +(\d+\. \w+): `).FindAllStringSubmatch(file.Doc.Text(), -1) {
		got = append(got, point[1])
	}
	if !slices.Equal(got, want) {
		t.Errorf("the package comment has\n%s\nand the checks are\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestSkipsSayWhy takes everything away that is optional.
func TestSkipsSayWhy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var skipped []string
		for _, c := range checks {
			full := newMemoryStore().harness()
			h := &Harness{Store: struct{ inbox.Store }{full.Store}, Write: full.Write, Effects: full.Effects}
			switch err := c.against(t.Context(), h); {
			case errors.Is(err, errSkip):
				skipped = append(skipped, c.name)
				t.Log(err)
			case err != nil:
				t.Errorf("%s: %v", c.name, err)
			}
		}
		want := []string{
			"LostConnectionReleasesClaim", "CommitProvesTheClaim", "WaitLeavesTheSessionAlone", "OutputsAreMarked",
			"DeletesByAge", "DeletesInBatches", "DeletesNoUnpublishedOutputs", "DeletesBesideClaims", "ForgetsKeys",
			"StoresShareClaims", "TablesAreIndependent", "CreatesItsSchema", "ClassifiesErrors", "ClassifiesWrappedErrors",
			"LeavesNoConnection", "LeavesNoGoroutine",
		}
		if !slices.Equal(skipped, want) {
			t.Errorf("skipped: %q, want %q", skipped, want)
		}
	})
}

func TestWantedEffectsStayAsTheyAre(t *testing.T) {
	t.Parallel()
	effects, want := []string{"b", "a"}, []string{"b", "a"}
	h := &Harness{Effects: func(context.Context) ([]string, error) { return effects, nil }}
	if err := wantEffects(t.Context(), h, want...); err != nil {
		t.Fatal(err)
	}
	for _, shared := range [][]string{effects, want} { // with the checks of other targets, which run at the same time
		if shared[0] != "b" {
			t.Errorf("sorted in place: %q", shared)
		}
	}
}

func TestHangsAndPanicsFail(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		defer close(release)
		for name, run := range map[string]func(context.Context, *Harness) error{
			"hang":  func(context.Context, *Harness) error { <-release; return nil },
			"panic": func(context.Context, *Harness) error { panic("fault") },
		} {
			if err := (check{run: run}).against(t.Context(), &Harness{}); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
	})
}

func BenchmarkMemory(b *testing.B) {
	Benchmark(b, func(*testing.B) *Harness { return newMemoryStore().harness() })
}

func TestBenchmarkFailsWithItsDeliveries(t *testing.T) {
	t.Parallel()
	failed := false
	testing.Benchmark(func(b *testing.B) {
		defer func() { failed = b.Failed() }()
		measure(b, 2, 0, func(id string) error {
			if id == "message-000000020" {
				return errors.New("fault")
			}
			return nil
		})
	})
	if !failed {
		t.Error("an error of a delivery was lost")
	}
}
