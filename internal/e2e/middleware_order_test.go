package e2e_test

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
)

// TestMiddlewareOrder has the documented outcome of the recommended order, and of others.
func TestMiddlewareOrder(t *testing.T) {
	t.Parallel()
	type handler func(s *shop, run int32, msg *message.Message) error
	type order []message.HandlerMiddleware
	retry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, ResetContextOnRetry: true}.Middleware
	staleRetry := middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware
	long, short := middleware.Timeout(time.Minute), middleware.Timeout(200*time.Millisecond)
	recoverer := middleware.Recoverer

	recommended := func(poison, inbox message.HandlerMiddleware) order {
		return order{poison, keepContext, retry, long, recoverer, inbox}
	}
	recommendedShort := func(poison, inbox message.HandlerMiddleware) order {
		return order{poison, keepContext, retry, short, recoverer, inbox}
	}
	timeoutInside := func(poison, inbox message.HandlerMiddleware) order {
		return order{poison, retry, long, recoverer, inbox}
	}
	poisonInside := func(poison, inbox message.HandlerMiddleware) order { return order{inbox, poison} }
	retryInside := func(poison, inbox message.HandlerMiddleware) order { return order{poison, inbox, retry} }
	recovererOutermost := func(poison, inbox message.HandlerMiddleware) order { return order{recoverer, poison, retry, inbox} }
	retryStale := func(poison, inbox message.HandlerMiddleware) order {
		return order{poison, staleRetry, short, recoverer, inbox}
	}

	failingAfter := func(poison, inbox message.HandlerMiddleware) order {
		return order{poison, func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				_, err := h(msg)
				return nil, errors.Join(err, errScripted)
			}
		}, inbox}
	}

	fail := func(s *shop, _ int32, msg *message.Message) error {
		return errors.Join(s.takeFromStock(msg), errScripted)
	}
	succeed := func(s *shop, _ int32, msg *message.Message) error { return s.takeFromStock(msg) }
	doPanic := func(s *shop, _ int32, msg *message.Message) error {
		_ = s.takeFromStock(msg)
		panic("scripted")
	}
	failOnce := func(s *shop, run int32, msg *message.Message) error {
		err := s.takeFromStock(msg)
		if run == 1 {
			err = errors.Join(err, errScripted)
		}
		return err
	}
	failSixTimes := func(s *shop, run int32, msg *message.Message) error {
		if run <= 6 { // twice as often as it is tried
			return errScripted
		}
		return s.takeFromStock(msg)
	}
	panicSixTimes := func(s *shop, run int32, msg *message.Message) error {
		if run <= 6 {
			panic("scripted")
		}
		return s.takeFromStock(msg)
	}
	hangOnce := func(s *shop, run int32, msg *message.Message) error {
		if run == 1 {
			<-msg.Context().Done()
			return msg.Context().Err()
		}
		return s.takeFromStock(msg)
	}
	abort := func(s *shop, _ int32, msg *message.Message) error {
		return errors.Join(s.exec(msg.Context(), "SELECT 1/0"), s.takeFromStock(msg))
	}

	for _, tt := range []struct {
		name    string
		store   string
		order   func(poison, inbox message.HandlerMiddleware) order
		handler handler

		// When the message is settled: how often it was delivered and the handler ran, how many messages were poisoned,
		// and what is in the database.
		deliveries, runs int32
		poisoned         int
		effects, rows    int
		logged           string

		// How often the handler runs when the poisoned message is published again.
		replayRuns int32
	}{
		{name: "recommended, failing", store: "sqlite", order: recommended, handler: fail, deliveries: 1, runs: 3, poisoned: 1, replayRuns: 1},
		{name: "recommended, panicking", store: "sqlite", order: recommended, handler: doPanic, deliveries: 1, runs: 3, poisoned: 1, replayRuns: 1},
		{name: "recommended, failing once", store: "sqlite", order: recommended, handler: failOnce, deliveries: 1, runs: 2, effects: 1, rows: 1},
		{name: "recommended, timing out once", store: "sqlite", order: recommendedShort, handler: hangOnce, deliveries: 1, runs: 2, effects: 1, rows: 1},
		{name: "recommended, aborting", store: "pgx", order: recommended, handler: abort, deliveries: 1, runs: 3, poisoned: 1, logged: "swallowed", replayRuns: 1},
		// Timeout leaves an ended context on the message, and publishers refuse to publish that.
		{name: "Timeout inside of PoisonQueue", store: "sqlite", order: timeoutInside, handler: failSixTimes, deliveries: 3, runs: 7, effects: 1, rows: 1},
		// PoisonQueue hides the error: half the work is committed, and the ID is burnt.
		{name: "PoisonQueue inside of the inbox", store: "sqlite", order: poisonInside, handler: fail, deliveries: 1, runs: 1, poisoned: 1, effects: 1, rows: 1, replayRuns: 0},
		// All attempts share one transaction.
		{name: "Retry inside of the inbox", store: "sqlite", order: retryInside, handler: failOnce, deliveries: 1, runs: 2, effects: 2, rows: 1},
		{name: "Retry inside of the inbox, on PostgreSQL", store: "pgx", order: retryInside, handler: abort, deliveries: 1, runs: 3, poisoned: 1, logged: "put Retry and PoisonQueue outside the inbox", replayRuns: 1},
		// A panic passes Retry and PoisonQueue unseen: one run per delivery, as many as it takes.
		{name: "Recoverer outermost", store: "sqlite", order: recovererOutermost, handler: panicSixTimes, deliveries: 7, runs: 7, effects: 1, rows: 1},
		// What it decides comes too late.
		{name: "a middleware that fails after the inbox", store: "sqlite", order: failingAfter, handler: succeed, deliveries: 1, runs: 1, poisoned: 1, effects: 1, rows: 1, replayRuns: 0},
		// The retries have an ended context and do not reach the handler. (An ended context is not poisoned.)
		{name: "Retry without ResetContextOnRetry", store: "sqlite", order: retryStale, handler: hangOnce, deliveries: 2, runs: 2, effects: 1, rows: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t, tt.store)
			logger := watermill.NewCaptureLogger()
			dedup := newDeduplicator(t, inbox.Config{Store: s.store, Logger: logger})
			poisoned := &collector{}
			poison, err := middleware.PoisonQueueWithFilter(poisoned, "poison", dedup.ShouldPoison)
			if err != nil {
				t.Fatal(err)
			}
			var deliveries, runs atomic.Int32
			var mended atomic.Bool
			router := newRouter(t, func(h message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					deliveries.Add(1)
					return h(msg)
				}
			})
			router.AddMiddleware(tt.order(poison, dedup.Middleware)...)
			broker := newBroker()
			router.AddConsumerHandler("handler", "orders", broker, func(msg *message.Message) error {
				run := runs.Add(1)
				if mended.Load() {
					return s.takeFromStock(msg)
				}
				return tt.handler(s, run, msg)
			})
			start(t, router)

			if err := broker.Publish("orders", message.NewMessage("id", []byte("id"))); err != nil {
				t.Fatal(err)
			}
			if deliveries.Load() != tt.deliveries || runs.Load() != tt.runs || len(poisoned.collected()) != tt.poisoned {
				t.Errorf("%d deliveries, want %d; %d runs, want %d; %d poisoned, want %d",
					deliveries.Load(), tt.deliveries, runs.Load(), tt.runs, len(poisoned.collected()), tt.poisoned)
			}
			wantCounts(t, s, map[string]int{allEffects: tt.effects, allRows: tt.rows})
			if logged := fmt.Sprintf("%+v", logger.Captured()[watermill.ErrorLogLevel]); !strings.Contains(logged, tt.logged) {
				t.Errorf("logged %s", logged)
			}

			mended.Store(true)
			for _, msg := range poisoned.collected() {
				if msg.UUID != "id" || string(msg.Payload) != "id" || msg.Metadata.Get(middleware.ReasonForPoisonedKey) == "" {
					t.Errorf("poisoned %s %q: %v", msg.UUID, msg.Payload, msg.Metadata)
				}
				if err := broker.Publish("orders", msg); err != nil {
					t.Fatal(err)
				}
			}
			if replays := runs.Load() - tt.runs; replays != tt.replayRuns {
				t.Errorf("%d runs after it was mended, want %d", replays, tt.replayRuns)
			}
			wantCounts(t, s, map[string]int{allEffects: tt.effects + int(tt.replayRuns), allRows: 1})
		})
	}
}

// TestAFailingOrderIsPoisonedOnRabbitMQ sends one through the recommended order, whose publisher is RabbitMQ's.
func TestAFailingOrderIsPoisonedOnRabbitMQ(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	s := newShop(t, "pgx")
	declare(t, amqpConfig(url), s.queues()...)
	t.Cleanup(func() { remove(t, url, s.queues()...) })
	subscriber, publisher, err := connect(amqpConfig(url))
	if err != nil {
		t.Fatal(err)
	}
	router, err := s.wire(newDeduplicator(t, inbox.Config{Store: s.store}), subscriber, publisher, "take_from_stock")
	if err != nil {
		t.Fatal(err)
	}
	start(t, router)
	noSQL, order := message.NewMessage("bad", []byte("'")), message.NewMessage("good", []byte("good"))
	if err := publisher.Publish(s.queues()[0], noSQL, order); err != nil {
		t.Fatal(err)
	}
	waitFor(t, ample, "the good order", func() bool { return s.mustCount(t, allRows) == 1 })
	waitFor(t, ample, "the poison queue", func() bool { return inspect(t, url, s.queues()[2]).Messages == 1 })
	wantCounts(t, s, map[string]int{taken: 1, allEffects: 1, allRows: 1})
}
