package crashtest_test

import (
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill"

	"github.com/watermill-inbox/inbox"
)

// TestEverySingleFaultOfTheMark breaks the connection at every message of the statement that marks outputs as published.
// Afterwards they are marked, or every duplicate publishes them still; marked again, none does.
func TestEverySingleFaultOfTheMark(t *testing.T) {
	t.Parallel()
	for _, stack := range stacks() {
		t.Run(stack.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, stack, true)
			for _, fault := range faults {
				for fault.N = 1; ; fault.N++ {
					id := watermill.NewUUID()
					key := inbox.Key{Consumer: consumer, MessageID: id}
					s.mustDeliver(id)
					if err := s.client.store.MarkOutputsPublished(t.Context(), []inbox.Key{key}); err != nil {
						t.Fatal(err)
					}
					id = watermill.NewUUID()
					key.MessageID = id
					s.mustDeliver(id)

					s.proxy.Reset()
					trap := s.proxy.Arm(fault)
					err := s.client.store.MarkOutputsPublished(t.Context(), []inbox.Key{key})
					trap.Release()
					at, fired := trap.Fired()
					seen := s.proxy.Snapshot()

					published := len(s.published[id])
					s.redeliver(id, s.deliver(id))
					if again := len(s.published[id]) - published; err == nil && again > 0 {
						t.Errorf("published %d outputs that were marked", again)
					}
					for range 5 {
						if err = s.client.store.MarkOutputsPublished(t.Context(), []inbox.Key{key}); err == nil {
							break
						}
					}
					if err != nil {
						t.Errorf("outputs cannot be marked after the fault: %v", err)
					}
					published = len(s.published[id])
					s.redeliver(id, s.deliver(id))
					if again := len(s.published[id]) - published; again > 0 {
						t.Errorf("published %d outputs that were marked after the fault", again)
					}
					s.check(id)
					if t.Failed() {
						t.Fatalf("%s at message %d (%s):\n%s", fmt.Sprint(fault.Kind), fault.N, at, seen)
					}
					if !fired {
						break
					}
				}
				if fault.N < 2 {
					t.Errorf("only %d messages were hit by %s from %d", fault.N-1, fault.Kind, fault.From)
				}
			}
		})
	}
}
