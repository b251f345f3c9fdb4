package storetest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

func TestSoundStorePasses(t *testing.T) {
	t.Parallel()
	Run(t, func(*testing.T) *Harness { return newMemoryStore().harness() })
}

// TestBrokenStoresFail plants one fault each, which the check has to find that names it.
func TestBrokenStoresFail(t *testing.T) {
	t.Parallel()
	eachKey := func(change func(string) string) func(inbox.Key) inbox.Key {
		return func(key inbox.Key) inbox.Key {
			return inbox.Key{Consumer: change(key.Consumer), MessageID: change(key.MessageID)}
		}
	}
	eachOutput := func(change func(*message.Message)) func([]*message.Message) []*message.Message {
		return func(msgs []*message.Message) []*message.Message {
			for _, msg := range msgs {
				change(msg)
			}
			return msgs
		}
	}
	for _, tt := range []struct {
		fault string
		plant func(*memoryStore)
		check string
	}{
		{"keeps effects after a rollback", func(s *memoryStore) { s.keep = true }, "RollbackReleasesClaim"},
		{"keeps claims after a rollback", func(s *memoryStore) { s.stuck = true }, "RollbackReleasesClaim"},
		{"shows effects before the commit", func(s *memoryStore) { s.dirty = true }, "EffectsComeWithTheClaim"},
		{"forgets what was processed", func(s *memoryStore) {
			n := 0
			s.key = func(key inbox.Key) inbox.Key { n++; key.MessageID += string(rune(n)); return key }
		}, "ClaimsOnce"},
		{"folds case", func(s *memoryStore) { s.key = eachKey(strings.ToLower) }, "KeysAreExact"},
		{"trims blanks", func(s *memoryStore) { s.key = eachKey(strings.TrimSpace) }, "KeysAreExact"},
		{"truncates", func(s *memoryStore) {
			s.key = eachKey(func(part string) string { return part[:min(len(part), 200)] })
		}, "KeysAreExact"},
		{"mixes up hashes", func(s *memoryStore) {
			s.key = eachKey(func(part string) string { return part[:min(len(part), len("sha256:"))] })
		}, "KeysOfAnyBytes"},
		{"ignores consumers", func(s *memoryStore) {
			s.key = func(key inbox.Key) inbox.Key { return inbox.Key{MessageID: key.MessageID} }
		}, "ConsumersAreIndependent"},
		{"joins consumer and ID", func(s *memoryStore) {
			s.key = func(key inbox.Key) inbox.Key { return inbox.Key{MessageID: key.Consumer + key.MessageID} }
		}, "ConsumersAreIndependent"},
		{"checks, then inserts", func(s *memoryStore) { s.noWait = true }, "WaiterSkipsAfterCommit"},
		{"does not wait for a rollback", func(s *memoryStore) { s.noWait = true }, "WaiterRunsAfterRollback"},
		{"lets many run", func(s *memoryStore) { s.noWait = true }, "ConcurrentClaimsRunOnce"},
		{"waits for ever", func(s *memoryStore) { s.unbound = true }, "WaitIsBounded"},
		{"begins for nobody", func(s *memoryStore) { s.deaf = true }, "CancelledBeforeBegin"},
		{"waits for nobody", func(s *memoryStore) { s.deaf = true }, "CancelledWhileWaiting"},
		{"ties transactions to Begin", func(s *memoryStore) { s.tied = true }, "TransactionOutlivesBegin"},
		{"commits the claim alone", func(s *memoryStore) { s.halfCommit = true }, "CommitWithEndedContext"},
		{"lets natives live on", func(s *memoryStore) { s.zombie = true }, "NativeIsDeadAfterwards"},
		{"fails the second rollback", func(s *memoryStore) { s.strict = true }, "RollbackIsIdempotent"},
		{"takes a lost commit for one", func(s *memoryStore) { s.forging = true }, "LostConnectionReleasesClaim"},
		{"shifts times", func(s *memoryStore) { s.zoned = true }, "RecordTellsTimes"},
		{"loses fingerprints", func(s *memoryStore) { s.noPrint = true }, "FingerprintIsKept"},
		{"refuses payloads", func(s *memoryStore) { s.picky = true }, "AnyPayloadIsStored"},
		{"loses outputs", func(s *memoryStore) {
			s.outputs = func([]*message.Message) []*message.Message { return nil }
		}, "OutputsAreKept"},
		{"loses their order", func(s *memoryStore) {
			s.outputs = func(msgs []*message.Message) []*message.Message { slices.Reverse(msgs); return msgs }
		}, "OutputsAreKept"},
		{"loses metadata", func(s *memoryStore) { s.outputs = eachOutput(func(msg *message.Message) { msg.Metadata = nil }) }, "OutputsAreKept"},
		{"changes bytes", func(s *memoryStore) {
			s.outputs = eachOutput(func(msg *message.Message) { msg.Payload = []byte(strings.ToValidUTF8(string(msg.Payload), "?")) })
		}, "OutputsAreKept"},
		{"changes UUIDs", func(s *memoryStore) {
			s.outputs = eachOutput(func(msg *message.Message) { msg.UUID = strings.ToUpper(msg.UUID) })
		}, "OutputsAreKept"},
		{"marks everything", func(s *memoryStore) { s.forgetful = true }, "OutputsAreMarked"},
		{"deletes young records", func(s *memoryStore) { s.young = true }, "DeletesExpired"},
		{"deletes unpublished outputs", func(s *memoryStore) { s.greedy = true }, "DeletesExpired"},
		{"knows no limit", func(s *memoryStore) { s.limitless = true }, "DeletesExpired"},
		{"miscounts", func(s *memoryStore) { s.miscounting = true }, "DeletesExpired"},
		{"forgets to forget", func(s *memoryStore) { s.remembers = true }, "ForgetsKeys"},
		{"takes every error for transient", func(s *memoryStore) { s.anything = true }, "ClassifiesErrors"},
		{"leaks connections", func(s *memoryStore) { s.leaking = true }, "LeavesNothingOver"},
	} {
		t.Run(tt.fault, func(t *testing.T) {
			t.Parallel()
			store := newMemoryStore()
			tt.plant(store)
			i := slices.IndexFunc(checks, func(c check) bool { return c.name == tt.check })
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second) // for the faults that hang
			defer cancel()
			if err := checks[i].against(ctx, store.harness()); err == nil || errors.Is(err, errSkip) {
				t.Errorf("%s: %v", tt.check, err)
			} else {
				t.Log(err)
			}
		})
	}
}

// TestStoresThatDoNotShare covers the one fault that takes two stores.
func TestStoresThatDoNotShare(t *testing.T) {
	t.Parallel()
	h := newMemoryStore().harness()
	h.Another = func() (inbox.Store, error) { return newMemoryStore(), nil }
	i := slices.IndexFunc(checks, func(c check) bool { return c.name == "StoresShareClaims" })
	if err := checks[i].against(t.Context(), h); err == nil {
		t.Error("no error")
	}
}

func TestEveryCheckIsProvenToFail(t *testing.T) {
	t.Parallel()
	if len(checks) != 27 {
		t.Errorf("%d checks, and 27 points in the package comment", len(checks))
	}
}
