GO      := go
LINT    := $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
VULN    := $(GO) run golang.org/x/vuln/cmd/govulncheck@v1.9.0
MODULES := . $(patsubst %/go.mod,%,$(wildcard _examples/go.mod bench/go.mod cmd/*/go.mod))
SERVERS := .bin/withservers
TEST    := $(GO) test -race -shuffle=on -timeout 10m

# each runs a command in every module.
each = @set -e; for module in $(MODULES); do echo "$$module: $(1)"; (cd $$module && $(1)); done

.PHONY: help
help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: test
test: build servers ## test everything, with throwaway servers
	$(SERVERS) $(TEST) ./...
	$(SERVERS) $(GO) test -count=1 -run TestTorture -timeout 10m ./internal/e2e

.PHONY: build
build: ## build and vet every module
	$(call each,$(GO) build ./...)
	$(call each,$(GO) vet ./...)

.PHONY: ci
ci: export INBOX_TEST_REQUIRE = postgres,mariadb,rabbitmq,pgbouncer,galera,spin
ci: tidy build lint servers ## everything that has to pass
	$(SERVERS) $(TEST) ./...
	$(SERVERS) $(GO) test -v -count=1 -run TestTorture -timeout 10m ./internal/e2e
	$(SERVERS) $(GO) test -run '^$$' -bench . -benchtime 1x -timeout 10m ./...
	$(GO) -C _examples run ./quickstart

.PHONY: lint
lint: ## golangci-lint
	$(call each,$(LINT) run --config $(CURDIR)/.golangci.yml ./...)

.PHONY: fmt
fmt: ## format the code
	$(call each,$(LINT) fmt --config $(CURDIR)/.golangci.yml ./...)

.PHONY: tidy
tidy: ## check that every go.mod is tidy
	$(call each,$(GO) mod tidy -diff)

.PHONY: bench
bench: servers ## benchmarks
	$(SERVERS) $(GO) test -run '^$$' -bench . -timeout 60m ./...

.PHONY: torture
torture: export INBOX_TORTURE_MESSAGES ?= 100000
torture: export INBOX_TORTURE_DURATION ?= 10m
torture: servers ## a pipeline in which everything is killed at random (INBOX_TORTURE_MESSAGES, INBOX_TORTURE_DURATION, INBOX_TEST_SEED)
	$(SERVERS) $(GO) test -v -count=1 -run '^TestTorture$$' -timeout 6h ./internal/e2e

.PHONY: quickstart
quickstart: ## the main job, on an embedded database
	$(GO) -C _examples run ./quickstart

.PHONY: vulncheck
vulncheck: ## known vulnerabilities, from a database on the internet
	$(call each,$(VULN) ./...)

# Built, since `go run` does not pass signals on.
.PHONY: servers
servers:
	@$(GO) build -o $(SERVERS) ./internal/cmd/withservers
