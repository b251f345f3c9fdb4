package e2e_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
)

// TestClosingTheRouterLosesNothing closes the router while a handler runs. Without a grace the handler's context ends and
// the message is processed by the next process; with one the handler finishes.
func TestClosingTheRouterLosesNothing(t *testing.T) {
	t.Parallel()
	for _, grace := range []time.Duration{0, time.Minute} {
		t.Run("grace="+grace.String(), func(t *testing.T) {
			t.Parallel()
			url := testenv.RabbitMQ(t)
			s := newShop(t, "pgx")
			declare(t, amqpConfig(url), s.queues()...)
			if err := publish(t.Context(), url, s.queues()[0], message.NewMessage("id", []byte("id"))); err != nil {
				t.Fatal(err)
			}
			poisoned := &collector{} // which takes messages whose context ended, unlike watermill-amqp
			// run consumes with a handler, to which it gives the context that the message came with.
			run := func(handler func(msg *message.Message, outer context.Context) error) (router *message.Router, ended chan error) {
				subscriber, err := amqp.NewSubscriber(amqpConfig(url), watermill.NopLogger{})
				if err != nil {
					t.Fatal(err)
				}
				dedup := newDeduplicator(t, inbox.Config{Store: s.store, ShutdownGrace: grace})
				poison, err := middleware.PoisonQueueWithFilter(poisoned, s.queues()[2], dedup.ShouldPoison)
				if err != nil {
					t.Fatal(err)
				}
				router, err = message.NewRouter(message.RouterConfig{CloseTimeout: ample}, watermill.NopLogger{})
				if err != nil {
					t.Fatal(err)
				}
				var outer context.Context // messages come one at a time
				router.AddMiddleware(poison, middleware.Recoverer, func(h message.HandlerFunc) message.HandlerFunc {
					return func(msg *message.Message) ([]*message.Message, error) {
						outer = msg.Context()
						return h(msg)
					}
				}, dedup.Middleware)
				router.AddConsumerHandler("handler", s.queues()[0], subscriber, func(msg *message.Message) error {
					return handler(msg, outer)
				})
				ended = make(chan error, 1)
				go func() { ended <- router.Run(context.WithoutCancel(t.Context())) }()
				<-router.Running()
				return router, ended
			}
			closeRouter := func(router *message.Router, ended chan error) {
				if err := router.Close(); err != nil {
					t.Error(err)
				}
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}

			entered := make(chan struct{})
			router, ended := run(func(msg *message.Message, outer context.Context) error {
				close(entered) // once: the closed router hands out nothing more
				<-outer.Done() // the router closes
				return s.takeFromStock(msg)
			})
			<-entered
			closeRouter(router, ended)
			finished := 0
			if grace > 0 {
				finished = 1
			}
			wantCounts(t, s, map[string]int{allEffects: finished, allRows: finished})

			// The message comes back although it was processed: watermill-amqp refuses it as soon as it closes.
			var runs atomic.Int32
			for left(t, url, s.queues()[0]) > 0 {
				router, ended = run(func(msg *message.Message, _ context.Context) error {
					runs.Add(1)
					return s.takeFromStock(msg)
				})
				waitFor(t, ample, "the message", func() bool { return inspect(t, url, s.queues()[0]).Messages == 0 })
				waitFor(t, ample, "its row", func() bool { return s.mustCount(t, allRows) == 1 })
				closeRouter(router, ended)
			}
			if int(runs.Load()) != 1-finished {
				t.Errorf("%d further runs", runs.Load())
			}
			wantCounts(t, s, map[string]int{allEffects: 1, allRows: 1})
			if len(poisoned.collected()) > 0 {
				t.Error("a healthy message was poisoned")
			}
			drain(t, url, s.queues())
		})
	}
}
