package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
)

// flaky is a publisher that fails as often as it is told to, one half of the times after it published.
type flaky struct {
	message.Publisher
	failures atomic.Int32
	calls    atomic.Int32
}

func (f *flaky) Publish(topic string, msgs ...*message.Message) error {
	f.calls.Add(1)
	left := f.failures.Add(-1)
	if left >= 0 && left%2 == 0 {
		return errScripted
	}
	if err := f.Publisher.Publish(topic, msgs...); err != nil {
		return err
	}
	if left >= 0 {
		return errScripted
	}
	return nil
}

// TestOutputsKeepEveryByteThoughPublishesFail publishes outputs from each database to each broker, with a publisher that
// fails several times.
func TestOutputsKeepEveryByteThoughPublishesFail(t *testing.T) {
	t.Parallel()
	const failures = 6
	large := make([]byte, 5<<20)
	for i := range large {
		large[i] = byte(i * 7)
	}
	payloads := [][]byte{nil, {}, {0x08, 0x96, 0x01, 0x12, 0x00}, {0xff, 0xfe}, []byte("a\x00b\\u0000"), large}
	outputs := func() []*message.Message {
		var msgs []*message.Message
		for i, payload := range payloads {
			msg := message.NewMessage(fmt.Sprintf("%d \xff", i), payload)
			msg.Metadata.Set("odd <&> \u00e9 \xff", "\x00\xfe \"")
			msg.Metadata.Set("empty", "")
			msgs = append(msgs, msg)
		}
		return msgs
	}
	brokers := map[string]func(t *testing.T, topics ...string) (message.Subscriber, message.Publisher){
		"gochannel": func(*testing.T, ...string) (message.Subscriber, message.Publisher) {
			broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
			return broker, broker
		},
		"rabbitmq": func(t *testing.T, topics ...string) (message.Subscriber, message.Publisher) {
			url := testenv.RabbitMQ(t)
			subscriber, publisher, err := connect(amqpConfig(url))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { remove(t, url, topics...) })
			return subscriber, publisher
		},
	}
	for store := range databases {
		for broker, connect := range brokers {
			t.Run(store+"/"+broker, func(t *testing.T) {
				t.Parallel()
				s := newShop(t, store)
				in, out := s.Prefix+"in", s.Prefix+"out"
				subscriber, publisher := connect(t, in, out)
				published := &flaky{Publisher: publisher}
				published.failures.Store(failures)
				duplicates := make(chan inbox.OnDuplicateParams, 100)
				dedup := newDeduplicator(t, inbox.Config{Store: s.store, OnDuplicate: func(p inbox.OnDuplicateParams) { duplicates <- p }})

				var runs atomic.Int32
				var mu sync.Mutex
				received := make(map[string]int) // by UUID
				router := newRouter(t)
				router.AddHandler("make", in, subscriber, out, published, func(*message.Message) ([]*message.Message, error) {
					runs.Add(1)
					return outputs(), nil
				}).AddMiddleware(dedup.Middleware)
				router.AddConsumerHandler("receive", out, subscriber, func(msg *message.Message) error {
					mu.Lock()
					defer mu.Unlock()
					received[msg.UUID]++
					i, err := strconv.Atoi(msg.UUID[:1])
					if err != nil || i >= len(payloads) {
						t.Errorf("UUID %q", msg.UUID)
						return nil
					}
					want := outputs()[i]
					if msg.UUID != want.UUID || !bytes.Equal(msg.Payload, want.Payload) || fmt.Sprint(msg.Metadata) != fmt.Sprint(want.Metadata) {
						t.Errorf("output %d changed: %d bytes, metadata %q", i, len(msg.Payload), msg.Metadata)
					}
					return nil
				})
				start(t, router)

				deliver := func() {
					t.Helper()
					if err := publisher.Publish(in, message.NewMessage("id", nil)); err != nil {
						t.Fatal(err)
					}
				}
				deliver()
				waitFor(t, ample, "every output", func() bool {
					mu.Lock()
					defer mu.Unlock()
					return len(received) == len(payloads)
				})
				waitFor(t, ample, "the mark", func() bool { return s.mustCount(t, unpublished) == 0 })
				// Each failure is followed by a redelivery, which hands out all of them.
				for range failures {
					if duplicate := receive(t, "a duplicate", duplicates); duplicate.Outputs != len(payloads) {
						t.Errorf("a duplicate handed out %d messages", duplicate.Outputs)
					}
				}
				calls := published.calls.Load()
				deliver()
				if duplicate := receive(t, "a duplicate", duplicates); duplicate.Outputs != 0 {
					t.Errorf("a duplicate handed out %d messages that were published", duplicate.Outputs)
				}
				if runs.Load() != 1 || published.calls.Load() != calls || published.failures.Load() >= 0 {
					t.Errorf("%d runs, %d publishes after the mark, %d failures left", runs.Load(), published.calls.Load()-calls, published.failures.Load())
				}
			})
		}
	}
}

// TestOutputsSurviveADeathAroundTheirPublish kills the process between the commit and the publish, and between the
// publish and the acknowledgment.
func TestOutputsSurviveADeathAroundTheirPublish(t *testing.T) {
	t.Parallel()
	for store := range databases {
		for _, point := range []deathPoint{beforePublish, afterPublish} {
			t.Run(store+"/"+string(point), func(t *testing.T) {
				t.Parallel()
				url := testenv.RabbitMQ(t)
				s := newShop(t, store)
				declare(t, amqpConfig(url), s.queues()...)
				if err := publish(t.Context(), url, s.queues()[0], message.NewMessage("id", []byte("id"))); err != nil {
					t.Fatal(err)
				}
				p := newProcess(t, consumer{
					Shop: *s, RabbitMQ: url, Handlers: []string{"pay", "book"},
					DieAt: point, Died: filepath.Join(t.TempDir(), "died"),
				})
				p.start()
				p.wantSuicide()
				wantCounts(t, s, map[string]int{allPayments: 1, unpublished: 1})
				p.start()
				waitFor(t, ample, "the ledger", func() bool { return s.mustCount(t, allBookings) == 1 })
				waitFor(t, ample, "the mark", func() bool { return s.mustCount(t, unpublished) == 0 })
				drain(t, url, s.queues(), p)
				wantCounts(t, s, map[string]int{allPayments: 1, allBookings: 1, allRows: 2})
			})
		}
	}
}

// TestOutboxSurvivesTheDeathOfItsRelay kills the process that relays, before it publishes a batch, and between the publish
// and the commit that takes the batch out of the outbox.
func TestOutboxSurvivesTheDeathOfItsRelay(t *testing.T) {
	t.Parallel()
	const n = 50
	for _, store := range []string{"pgx", "stdlib", "mysql"} {
		for _, point := range []deathPoint{beforePublish, afterPublish} {
			t.Run(store+"/"+string(point), func(t *testing.T) {
				t.Parallel()
				url := testenv.RabbitMQ(t)
				s := newShop(t, store)
				s.createOutbox(t)
				declare(t, amqpConfig(url), s.queues()...)
				msgs := orders(seeded(t), 0, n, func(int) int { return 2 })
				if err := publish(t.Context(), url, s.queues()[0], msgs...); err != nil {
					t.Fatal(err)
				}
				p := newProcess(t, consumer{
					Shop: *s, RabbitMQ: url, Handlers: []string{"pay", "book"}, Outbox: true,
					DieAt: point, Died: filepath.Join(t.TempDir(), "died"),
				})
				p.start()
				p.wantSuicide()
				waitFor(t, ample, "everything that was paid to be in the outbox", func() bool { // some may be committing still
					waiting := s.mustCount(t, inOutbox)
					return waiting > 0 && waiting == s.mustCount(t, allPayments)
				})
				p.start()
				waitFor(t, ample, "the ledger", func() bool { return s.mustCount(t, allBookings) == n })
				waitFor(t, ample, "the outbox", func() bool { return s.mustCount(t, inOutbox) == 0 })
				drain(t, url, s.queues(), p)
				wantCounts(t, s, map[string]int{
					allPayments: n, paidOrders: n, allBookings: n, bookedOrders: n, allRows: 2 * n, unpublished: 0,
				})
			})
		}
	}
}

// TestPipelineIsExactThoughBothStagesAreKilled runs orders → payments → ledger, each stage in a process of its own.
func TestPipelineIsExactThoughBothStagesAreKilled(t *testing.T) {
	t.Parallel()
	for _, outbox := range []bool{false, true} {
		t.Run(fmt.Sprintf("outbox=%t", outbox), func(t *testing.T) {
			t.Parallel()
			killBothStages(t, outbox)
		})
	}
}

func killBothStages(t *testing.T, outbox bool) {
	t.Helper()
	n := setting(t, "INBOX_E2E_MESSAGES", 1000, strconv.Atoi)
	random := seeded(t)
	url := testenv.RabbitMQ(t)
	s := newShop(t, "pgx")
	s.createOutbox(t)
	declare(t, amqpConfig(url), s.queues()...)
	stages := []*process{
		newProcess(t, consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"pay"}, Outbox: outbox}),
		newProcess(t, consumer{Shop: *s, RabbitMQ: url, Handlers: []string{"book"}}),
	}
	for _, stage := range stages {
		stage.start()
	}
	published := make(chan error)
	msgs := orders(random, 0, n, func(int) int { return 2 })
	go func() { published <- publish(context.WithoutCancel(t.Context()), url, s.queues()[0], msgs...) }()
	const kills = 8
	for kill := range kills {
		goal := n*(kill+1)/(kills+2) + random.IntN(n/(kills+2))
		waitFor(t, ample, fmt.Sprintf("%d bookings", goal), func() bool { return s.mustCount(t, allBookings) >= goal })
		stage := stages[kill%2]
		stage.kill()
		stage.start()
	}
	if err := <-published; err != nil {
		t.Fatal(err)
	}
	waitFor(t, ample, "every booking", func() bool { return s.mustCount(t, allBookings) == n })
	waitFor(t, ample, "the outbox", func() bool { return s.mustCount(t, inOutbox) == 0 })
	drain(t, url, s.queues(), stages...)
	wantCounts(t, s, map[string]int{allPayments: n, paidOrders: n, allBookings: n, bookedOrders: n, allRows: 2 * n})
}
